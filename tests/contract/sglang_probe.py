"""sglang under contract. A process serves one test after the other, because a start takes longer than they do."""

import atexit
import os

import torch
from engine_probe import DEVICE, load

from reroll.infer.base import EngineCounts
from reroll.models.load import load_tokenizer
from reroll_zoo.external_engine.engine import end_ids_of
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.sglang.config import SglangConfig
from reroll_zoo.sglang.engine import SglangEngine, open_process
from reroll_zoo.sglang.messages import ResetCache

_MAX_RUNNING = 8
_OPEN = {}
"""The one process at a time, by what it was opened with."""
_OPTIONS = {
    "cuda": {"attention_backend": "triton"},  # Others take no heads of 32.
    # With steps launched ahead, as on a GPU.
    "cpu": {"attention_backend": "torch_native", "disable_overlap_schedule": False, "max_total_tokens": 8192},
}[DEVICE]

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # On a GPU sglang's attention would round fp32 to ten bits, and the oracle does not.


def close_all():
    for process in _OPEN.values():
        process.close()
    _OPEN.clear()


atexit.register(close_all)


def process_of(folder, precision):
    key = (folder, precision)
    if key not in _OPEN:
        close_all()
        config = SglangConfig(
            kind="sglang",
            python=os.environ["REROLL_SGLANG_PYTHON"],
            max_running=_MAX_RUNNING,
            gpu_memory_utilization=0.03,
            enforce_eager=True,
            options=_OPTIONS,
        )
        _OPEN[key] = open_process(folder, config, precision=precision, device=DEVICE)
    return _OPEN[key]


def open_engine(folder, *, max_running=_MAX_RUNNING, lora=None, dtype=torch.float32):
    """As good as new: no requests, an empty cache, the weights of the folder. Ends the one before."""
    process = process_of(folder, "bf16" if dtype is torch.bfloat16 else "fp32")
    process.ask(ResetCache())
    tokenizer = load_tokenizer(folder)
    engine = SglangEngine(
        process,
        tokenizer,
        HFWeightAssembler(folder, lora=lora),
        end_ids=end_ids_of(folder, tokenizer),
        dtype=dtype,
        device=DEVICE,
        max_running=max_running,
        can_sleep=False,
    )
    engine.load_weights(dict(load(folder, lora).named_parameters()), version=0)
    engine.counts = EngineCounts()
    return engine
