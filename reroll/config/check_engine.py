"""What an engine's settings promise beyond their types."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import parse_devices
from reroll.config.parts import Devices, DeviceSelection, ExternalEngineConfig
from reroll.config.registry import package_violations
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def engine_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Where an engine cannot run as asked."""
    engine = config.engine
    yield from package_violations("engine", engine)
    yield from engine.violations(config.runtime)
    if not isinstance(engine, ExternalEngineConfig):
        return
    num_gpus = _num_named(engine.devices)
    if num_gpus is not None and num_gpus < engine.tp:
        yield Violation(
            "engine.devices",
            f"names {num_gpus} GPU{'s' if num_gpus > 1 else ''}, and each worker is spread over {engine.tp}",
            f"name at least {engine.tp} of one node, or lower engine.tp",
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
