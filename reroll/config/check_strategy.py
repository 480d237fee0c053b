"""Checks of how models are held: ranks that add up, and a runtime that can run them."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import model_card, parse_devices
from reroll.config.parts import Devices, DeviceSelectionConfig, FixedModelConfig, LocalRuntimeConfig, RuntimeConfig
from reroll.config.registry import package_violations
from reroll.config.strategy import Fsdp2StrategyConfig, RanksStrategyConfig
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
    yield from strategy.violations(where, model)
    if isinstance(strategy, Fsdp2StrategyConfig):
        yield from _heads_violations(where, model.model, strategy)
        yield from _experts_violations(where, model.model, strategy)
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
    if isinstance(strategy, Fsdp2StrategyConfig):
        yield from _layout_violations(where, strategy, num_ranks=strategy.num_ranks or max(num_devices, 1))


def _layout_violations(where: str, strategy: Fsdp2StrategyConfig, *, num_ranks: int) -> Iterator[Violation]:
    """Ranks that do not add up."""
    if num_ranks % (strategy.replicas * strategy.ranks_per_share):
        yield Violation(
            f"{where}.strategy",
            f"its ranks ({num_ranks}) do not divide into replicas {strategy.replicas} × sp {strategy.sp} × tp {strategy.tp}",
            "make replicas × sp × tp a divisor of the number of ranks: change them, the devices, or on the CPU num_ranks",
        )
        return
    num_shards = num_ranks // (strategy.replicas * strategy.tp)
    if num_shards % strategy.ep:
        yield Violation(
            f"{where}.strategy.ep",
            f"the {num_shards} ranks of a replica do not divide into groups of {strategy.ep}",
            f"make ep a divisor of {num_shards}",
        )


def _heads_violations(where: str, model: str | None, strategy: Fsdp2StrategyConfig) -> Iterator[Violation]:
    """Each rank that shares sequences computes whole attention heads. A model that is not on this disk is judged when it is."""
    num_heads = _stated(model, "num_attention_heads")
    if strategy.sp > 1 and num_heads is not None and num_heads % strategy.ranks_per_share:
        yield Violation(
            f"{where}.strategy.sp",
            f"the {num_heads} attention heads of {model} cannot be shared by sp {strategy.sp} × tp {strategy.tp} ranks",
            f"make sp × tp a divisor of {num_heads}",
        )


def _experts_violations(where: str, model: str | None, strategy: Fsdp2StrategyConfig) -> Iterator[Violation]:
    """Each rank that shares out experts computes whole ones."""
    num_experts = _stated(model, "num_experts", "num_local_experts")
    if strategy.tp > 1 and (strategy.ep > 1 or num_experts):
        yield Violation(
            f"{where}.strategy.tp",
            "tp cuts the matrices of dense layers, and cannot cut experts",
            "set tp to 1: ep shares experts out, and sp long sequences",
        )
    if strategy.ep > 1 and num_experts is not None and (num_experts % strategy.ep or not num_experts):
        yield Violation(
            f"{where}.strategy.ep",
            f"the {num_experts} experts of {model} cannot be shared out to {strategy.ep} ranks",
            f"make ep a divisor of {num_experts}" if num_experts else "set ep to 1",
        )


def _stated(model: str | None, *names: str) -> int | None:
    """What the model's config.json says under the first of these names that it has; 0 if none: it has no such thing."""
    card = model_card(model) if model else None
    if card is None:
        return None
    found = next((card[name] for name in names if name in card), 0)
    return found if isinstance(found, int) else None


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
