"""Models as roles of a run: something to train, or something to hold fixed."""

from __future__ import annotations

from reroll.config.parts import FixedModelConfig, ModelConfig
from reroll.config.strategy import RanksStrategyConfig
from reroll.models.load import Head
from reroll.runtime.base import Placement, Runtime
from reroll.training.cluster import Rendezvous, TrainCluster, TrainWorker


async def spawn_model(
    runtime: Runtime, config: ModelConfig, *, role: str, total_steps: int, head: Head = "language"
) -> TrainCluster:
    """A model to train for `total_steps` optimizer steps; one for 0 steps is held fixed."""
    placement = Placement(role, train_devices(runtime, config))
    rendezvous = Rendezvous(runtime.host) if len(placement.devices) > 1 else None
    workers = await runtime.spawn(
        TrainWorker,
        placement,
        config,
        total_steps=total_steps,
        head=head,
        rendezvous=rendezvous.address if rendezvous else None,
    )
    return TrainCluster(workers, ranks_per_share=config.strategy.ranks_per_share, rendezvous=rendezvous)


def train_devices(runtime: Runtime, config: FixedModelConfig) -> tuple[str, ...]:
    """The device of each of a model's workers."""
    devices = runtime.devices(config.devices)
    if not isinstance(config.strategy, RanksStrategyConfig):
        return devices[:1]
    num_ranks = config.strategy.num_ranks or len(devices)
    if devices == ("cpu",):
        return devices * num_ranks
    if num_ranks > len(devices):
        raise ValueError(f"strategy.num_ranks is {num_ranks}, but devices names {len(devices)} GPUs: name as many")
    return devices[:num_ranks]


async def spawn_fixed(runtime: Runtime, config: FixedModelConfig, *, role: str, head: Head = "language") -> TrainCluster:
    """A model that only answers: a reference, a teacher or a reward model. It holds nothing but its weights."""
    plain = ModelConfig(model=config.model, strategy=config.strategy, devices=config.devices)
    return await spawn_model(runtime, plain, role=role, total_steps=0, head=head)


async def reference_of(
    runtime: Runtime, config: ModelConfig, policy: TrainCluster, *, model: str | None = None
) -> TrainCluster:
    """The policy as it started, if it is asked without an adapter: the policy itself where it trains one. Or another model."""
    if config.lora and model is None:
        return policy
    return await spawn_fixed(runtime, config.model_copy(update={"model": model or config.model}), role="reference")
