"""The options of the vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from reroll.config.parts import LocalRuntimeConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.external_engine.config import ExternalEngineConfig

_MADE_HERE = {
    "async_scheduling",
    "device_ids",
    "distributed_executor_backend",
    "dtype",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "logits_processors",
    "logprobs_mode",
    "max_model_len",
    "max_num_seqs",
    "model",
    "tensor_parallel_size",
}
"""Settings of `EngineArgs` that reroll relies on, or has a field of its own for."""


class VllmEngineConfig(ExternalEngineConfig):
    """vLLM, in the worker's process. Needs the extra `vllm`."""

    runs: ClassVar[str] = "reroll_zoo.vllm.internals:CheckedVllm"
    packages: ClassVar[Mapping[str, str]] = {"vllm": "reroll[vllm]"}

    kind: Literal["vllm"] = "vllm"
    cpu_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the cache where the engine runs on the CPU."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """More settings of vLLM's `EngineArgs`, by their names there, e.g. `{kv_cache_dtype: fp8}`. Those that reroll makes itself
    are refused."""

    @property
    def cpu_pool_gib(self) -> float:
        return self.cpu_cache_gib

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        yield from super().violations(config)
        if made_here := sorted(_MADE_HERE & self.options.keys()):
            yield Violation(
                "engine.options",
                f"{', '.join(made_here)}: reroll makes this setting itself",
                "leave it out, and see engine's own fields",
            )
        if self.num_workers > 1 and isinstance(config.runtime, LocalRuntimeConfig):
            yield Violation(
                "engine.num_workers",
                "a process holds one vLLM engine, and the local runtime is one process",
                "set it to 1, or runtime.kind to processes or ray",
            )
