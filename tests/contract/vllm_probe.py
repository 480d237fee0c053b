"""vLLM under contract. An engine serves one test after the other, because a start takes longer than they do."""

import contextlib
import gc
import os
from types import SimpleNamespace

import pytest
import torch
from engine_probe import DEVICE, load
from vllm.platforms import current_platform

from reroll.infer.base import EngineCounts
from reroll.models.load import load_tokenizer
from reroll_zoo.external_engine.engine import end_ids_of
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.vllm.config import VllmEngineConfig
from reroll_zoo.vllm.engine import VllmEngine, close_llm, open_llm

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # On a GPU vLLM's attention would round fp32 to ten bits, and the oracle does not.

_MAX_RUNNING = 8
_OPEN = {}
"""The one that a process may hold, by what it was opened with."""


@contextlib.contextmanager
def launching_ahead():
    """Let vLLM on a CPU launch steps ahead, as it does on a GPU, for as long as this is open.

    It refuses because it would gain nothing: a step on a CPU is over when it has been launched. So there is nothing to wait
    for, and streams and events need do nothing.
    """
    update = current_platform.check_and_update_config

    def update_but_launch_ahead(settings):
        update(settings)
        settings.scheduler_config.async_scheduling = True

    def over(*_, **__):
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, wait_stream=lambda stream: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current_platform, "check_and_update_config", update_but_launch_ahead)
        for name in ("Event", "Stream", "current_stream"):
            patch.setattr(torch.cuda, name, over)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        yield


def llm_of(folder, precision):
    key = (folder, precision)
    if key not in _OPEN:
        while _OPEN:  # And no variable for it: whoever names it keeps some of its memory, and vLLM then opens no other.
            close_llm(_OPEN.popitem()[1])
        gc.collect()  # What is left of it must not go, and take down what they share, after the next has come.
        config = VllmEngineConfig(
            kind="vllm", max_running=_MAX_RUNNING, cpu_cache_gib=1 / 16, gpu_memory_utilization=0.03, enforce_eager=True
        )
        _OPEN[key] = open_llm(folder, config, precision=precision, device=DEVICE)
    return _OPEN[key]


def open_engine(folder, *, max_running=_MAX_RUNNING, lora=None, dtype=torch.float32):
    """As good as new: no requests, an empty cache, the weights of the folder. Ends the one before."""
    llm = llm_of(folder, "bf16" if dtype is torch.bfloat16 else "fp32")
    scheduler = llm.engine_core.engine_core.scheduler
    llm.engine_core.abort_requests(list(scheduler.requests))
    for limit in ("max_num_running_reqs", "max_num_active_reqs"):  # The latter in newer versions.
        setattr(scheduler, limit, min(max_running, _MAX_RUNNING))
    tokenizer = load_tokenizer(folder)
    engine = VllmEngine(llm, tokenizer, HFWeightAssembler(folder, lora=lora), end_ids=end_ids_of(folder, tokenizer))
    engine.load_weights(dict(load(folder, lora).named_parameters()), version=0)
    engine.counts = EngineCounts()
    return engine
