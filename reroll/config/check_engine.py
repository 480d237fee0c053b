"""What an engine's settings promise beyond their types."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import parse_devices
from reroll.config.parts import Devices, DeviceSelection, RayRuntime, VllmEngine
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
    num_gpus = _num_named(engine.devices)
    if num_gpus is not None and num_gpus < engine.tensor_parallel:
        yield Violation(
            "engine.devices",
            f"names {num_gpus} GPU{'s' if num_gpus > 1 else ''}, and each worker is spread over {engine.tensor_parallel}",
            f"name at least {engine.tensor_parallel} of one node, or lower engine.tensor_parallel",
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if engine.max_model_len is not None and engine.max_model_len < longest:
        yield Violation(
            "engine.max_model_len",
            f"{engine.max_model_len} is less than max_prompt_tokens + max_tokens = {longest}",
            f"set it to at least {longest}, or leave it out",
        )


def _num_named(devices: Devices) -> int | None:
    """GPUs that are named; None where they are not: `auto`, the CPU, or what is no device at all."""
    if isinstance(devices, DeviceSelection):
        return devices.gpus
    if devices in ("auto", "cpu"):
        return None
    try:
        return len(parse_devices(devices))
    except ValueError:
        return None  # Reported as such.
