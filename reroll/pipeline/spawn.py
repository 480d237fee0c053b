"""Models as roles of a run: something to train, or something to hold fixed."""

from __future__ import annotations

from reroll.config.parts import ModelConfig
from reroll.models.load import Head
from reroll.runtime.base import Placement, Runtime
from reroll.train.cluster import TrainCluster
from reroll.train.worker import TrainWorker


async def spawn_model(
    runtime: Runtime, config: ModelConfig, *, role: str, total_steps: int, head: Head = "language"
) -> TrainCluster:
    """A model to train for `total_steps` optimizer steps; one for 0 steps is held fixed."""
    placement = Placement(role, runtime.devices(config.devices)[:1])
    return TrainCluster(await runtime.spawn(TrainWorker, placement, config, total_steps=total_steps, head=head))


async def spawn_fixed(runtime: Runtime, config: ModelConfig, *, role: str) -> TrainCluster:
    """A model that only answers: a reference or a teacher. It holds nothing but its weights."""
    return await spawn_model(runtime, config.model_copy(update={"lora": None}), role=role, total_steps=0)
