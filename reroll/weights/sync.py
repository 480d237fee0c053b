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

    Only what is trained travels: of a policy with an adapter, the adapter. Where trainer and engine `share_memory`, the
    first push also hands over the frozen weights, by reference, so that the process does not go on holding them twice.
    """

    def __init__(self, policy: TrainCluster, engine: InferCluster, *, share_memory: bool, snapshot: bool) -> None:
        self._policy = policy
        self._engine = engine
        self._snapshot = snapshot
        self._owes_frozen = share_memory

    async def push(self, *, version: int) -> Stats:
        """Every token the engine writes from here on is written by these weights and tagged with this version."""
        started = time.perf_counter()
        weights = await self._policy.weights()
        if self._snapshot:
            weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if self._owes_frozen:
            weights = {**await self._policy.weights(frozen=True), **weights}
        await self._engine.load_weights(weights, version=version)
        self._owes_frozen = False
        num_bytes = float(sum(tensor.nbytes for tensor in weights.values()))
        return Stats({"time/push_s": Last(time.perf_counter() - started), "push/bytes": Last(num_bytes)})
