"""What an engine's settings promise beyond their types."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.parts import RayRuntime, VllmEngine
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def engine_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Where vLLM cannot run as asked."""
    engine, is_ray = config.engine, isinstance(config.runtime, RayRuntime)
    if not isinstance(engine, VllmEngine):
        return
    if engine.num_workers > 1 and not is_ray:
        yield Violation(
            "engine.num_workers",
            "a process holds one vLLM engine, and the local runtime is one process",
            "set it to 1, or runtime.kind to ray",
        )
    if engine.tensor_parallel > 1 and is_ray:
        yield Violation(
            "engine.tensor_parallel",
            "a Ray worker sees the one GPU that it was given",
            "set it to 1 and raise engine.num_workers, or set runtime.kind to local",
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if engine.max_model_len is not None and engine.max_model_len < longest:
        yield Violation(
            "engine.max_model_len",
            f"{engine.max_model_len} is less than max_prompt_tokens + max_tokens = {longest}",
            f"set it to at least {longest}, or leave it out",
        )
