"""Checks of how models are held: ranks that add up, and a runtime that can run them."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import parse_devices
from reroll.config.parts import Devices, FixedModel, Fsdp2Strategy, LocalRuntime, RuntimeConfig
from reroll.errors import Violation


def strategy_violations(where: str, model: FixedModel, *, runtime: RuntimeConfig, num_gpus: int | None) -> Iterator[Violation]:
    """What keeps a model's strategy from running on its devices. `num_gpus` is None where only the cluster knows."""
    strategy = model.strategy
    if not isinstance(strategy, Fsdp2Strategy):
        return
    if isinstance(runtime, LocalRuntime):
        yield Violation(
            f"{where}.strategy.kind",
            "fsdp2 runs each rank in a process of its own, and the local runtime has threads",
            "set runtime: {kind: ray}, or use strategy torch",
        )
    num_devices = _num_devices(model.devices, num_gpus)
    if num_devices is None:
        return
    if num_devices and (strategy.num_ranks or 0) > num_devices:
        yield Violation(
            f"{where}.strategy.num_ranks",
            f"{strategy.num_ranks} ranks do not fit on {num_devices} GPU{'s' if num_devices > 1 else ''}",
            f"set it to at most {num_devices}, or name more in {where}.devices",
        )
        return
    num_ranks, copies = strategy.num_ranks or max(num_devices, 1), strategy.replicas * strategy.tp
    if num_ranks % copies:
        yield Violation(
            f"{where}.strategy",
            f"its ranks ({num_ranks}) do not divide into replicas {strategy.replicas} × tp {strategy.tp}",
            "make replicas × tp a divisor of the number of ranks: change them, the devices, or on the CPU num_ranks",
        )


def _num_devices(value: Devices, num_gpus: int | None) -> int | None:
    """GPUs that the devices name: 0 for the CPU, None where that cannot be told."""
    if value == "auto" and num_gpus is None:
        return None
    try:
        devices = parse_devices(value, num_gpus=num_gpus)
    except ValueError:
        return None  # Reported as such.
    return 0 if devices == ("cpu",) else len(devices)
