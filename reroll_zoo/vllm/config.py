"""The options of the vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.parts import LocalRuntimeConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.external_engine.config import ExternalEngineConfig


class VllmEngineConfig(ExternalEngineConfig):
    """vLLM, in the worker's process. Needs the extra `vllm`."""

    runs: ClassVar[str] = "reroll_zoo.vllm.engine:VllmEngine"
    packages: ClassVar[Mapping[str, str]] = {"vllm": "reroll[vllm]"}

    kind: Literal["vllm"] = "vllm"
    cpu_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the cache where the engine runs on the CPU."""

    @property
    def cpu_pool_gib(self) -> float:
        return self.cpu_cache_gib

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        yield from super().violations(config)
        if self.num_workers > 1 and isinstance(config.runtime, LocalRuntimeConfig):
            yield Violation(
                "engine.num_workers",
                "a process holds one vLLM engine, and the local runtime is one process",
                "set it to 1, or runtime.kind to processes or ray",
            )
