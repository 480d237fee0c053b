"""Publishes a policy's weights to its engine under a version number."""

from __future__ import annotations

import time

from reroll.infer.cluster import InferCluster
from reroll.observe.metrics import Last, Stats
from reroll.train.cluster import TrainCluster


class WeightSync:
    """Carries weights from the policy to the engine.

    Workers of one process pass tensors by reference, so the engine adopts the trainer's own parameters and a push copies
    nothing. That is only sound while generation and training take turns: with a staleness budget the engine goes on
    generating during the next update, and gets a `snapshot`. Over Ray the object store carries the tensors.
    """

    def __init__(self, policy: TrainCluster, engine: InferCluster, *, snapshot: bool) -> None:
        self._policy = policy
        self._engine = engine
        self._snapshot = snapshot

    async def push(self, *, version: int) -> Stats:
        """Every token the engine writes from here on is written by these weights and tagged with this version."""
        started = time.perf_counter()
        weights = await self._policy.weights()
        if self._snapshot:
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        await self._engine.load_weights(weights, version=version)
        return Stats({"time/push_s": Last(time.perf_counter() - started)})
