"""vLLM under contract. An engine serves one test after the other, because a start takes longer than they do."""

import gc

import torch
from engine_probe import DEVICE, load

from reroll.config.parts import VllmEngine as VllmConfig
from reroll.infer.base import EngineCounts
from reroll.infer.vllm.engine import VllmEngine, end_ids, open_llm
from reroll.infer.vllm.weights import Weights
from reroll.models.load import load_tokenizer

_OPEN = {}
"""The one that a process may hold, by what it was opened with."""


def llm_of(folder, precision, max_running):
    key = (folder, precision, max_running)
    if key not in _OPEN:
        for llm in _OPEN.values():
            llm.engine_core.shutdown()
        _OPEN.clear()
        gc.collect()  # What is left of it must not go, and take down what they share, after the next has come.
        config = VllmConfig(
            kind="vllm", max_running=max_running, cpu_cache_gib=1 / 16, gpu_memory_utilization=0.1, enforce_eager=True
        )
        _OPEN[key] = open_llm(folder, config, precision=precision, device=DEVICE)
    return _OPEN[key]


def open_engine(folder, *, max_running=8, lora=None, dtype=torch.float32):
    """As good as new: no requests, an empty cache, the weights of the folder. Ends the one before."""
    llm = llm_of(folder, "bf16" if dtype is torch.bfloat16 else "fp32", max_running)
    llm.abort_request(list(llm.output_processor.request_states), internal=True)
    tokenizer = load_tokenizer(folder)
    engine = VllmEngine(llm, tokenizer, Weights(folder, lora=lora), end_ids=end_ids(folder, tokenizer))
    engine.load_weights(dict(load(folder, lora).named_parameters()), version=0)
    engine.counts = EngineCounts()
    return engine
