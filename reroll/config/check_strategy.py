"""Checks of how models are held: ranks that add up, and a runtime that can run them."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import parse_devices
from reroll.config.parts import Devices, DeviceSelectionConfig, FixedModelConfig, LocalRuntimeConfig, RuntimeConfig
from reroll.config.registry import package_violations
from reroll.config.strategy import RanksStrategyConfig
from reroll.errors import Violation


def strategy_violations(
    where: str, model: FixedModelConfig, *, runtime: RuntimeConfig, num_gpus: int | None
) -> Iterator[Violation]:
    """What keeps a model's strategy from running on its devices. `num_gpus` is None where only the cluster knows."""
    strategy = model.strategy
    if not isinstance(strategy, RanksStrategyConfig):
        return
    if isinstance(runtime, LocalRuntimeConfig):
        yield Violation(
            f"{where}.strategy.kind",
            f"{strategy.kind} runs each rank in a process of its own, and the local runtime has threads",
            "set runtime: {kind: processes} (or ray, for several machines), or use strategy torch",
        )
    yield from package_violations(f"{where}.strategy", strategy)
    num_devices = _num_devices(model.devices, num_gpus)
    num_ranks = None if num_devices is None else strategy.num_ranks or max(num_devices, 1)
    if num_devices and num_ranks and num_ranks > num_devices:
        yield Violation(
            f"{where}.strategy.num_ranks",
            f"{num_ranks} ranks do not fit on {num_devices} GPU{'s' if num_devices > 1 else ''}",
            f"set it to at most {num_devices}, or name more in {where}.devices",
        )
        num_ranks = None
    yield from strategy.violations(where, model, num_ranks=num_ranks)


def _num_devices(value: Devices, num_gpus: int | None) -> int | None:
    """GPUs that the devices name: 0 for the CPU, None where that cannot be told."""
    if isinstance(value, DeviceSelectionConfig):
        return value.gpus
    if value == "auto" and num_gpus is None:
        return None
    try:
        devices = parse_devices(value, num_gpus=num_gpus)
    except ValueError:
        return None  # Reported as such.
    return 0 if devices == ("cpu",) else len(devices)
