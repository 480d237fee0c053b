"""Pipelines that learn from a fixed table: draw rows, look up what the loss needs, take one optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from reroll.config.offline import OfflineConfig
from reroll.data.sampler import Sampler
from reroll.observe.metrics import Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.tokens.batch import Batch
from reroll.train.base import Loss
from reroll.train.cluster import TrainCluster

OC = TypeVar("OC", bound=OfflineConfig)
R = TypeVar("R")


class OfflinePipeline(Pipeline[OC], Generic[OC, R]):
    """Subclasses say how rows become a batch, what the loss is, and what held-out rows tell."""

    loss: Loss

    def __init__(self, config: OC, context: RunContext, policy: TrainCluster, rows: Sampler[R], held_out: list[R]) -> None:
        super().__init__(config, context)
        self.policy = policy
        self.rows = rows
        self.held_out = held_out

    @abstractmethod
    async def batch_of(self, rows: Sequence[R]) -> Batch:
        """The rows packed, with all that the loss reads."""

    @abstractmethod
    async def measure(self, batch: Batch) -> Stats:
        """What the model makes of held-out rows."""

    async def loss_on(self, batch: Batch) -> Loss:
        """The loss of one step, where something must be measured for it before the policy moves."""
        return self.loss

    async def step(self, step: int) -> Stats:
        batch = await self.batch_of([self.rows.next() for _ in range(self.config.rows_per_step)])
        loss = await self.loss_on(batch)
        return await self.policy.train(batch, loss, seed=step) + Stats({"tokens": Sum(float(batch.num_tokens))})

    async def evaluate(self) -> Stats:
        if not self.held_out:
            return Stats()
        return (await self.measure(await self.batch_of(self.held_out))).prefixed("eval/")

    async def start(self, num_steps: int) -> None:
        return None

    async def finish(self) -> None:
        return None

    def is_eval_due(self, num_steps: int) -> bool:
        every = self.config.eval_every
        return bool(every) and num_steps % every == 0

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows.restore(state["rows"])
