"""Pipelines that learn from a fixed table: draw rows, look up what the loss needs, take one optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from reroll.config.imports import import_object
from reroll.data.sources import SourceRows
from reroll.errors import DataError
from reroll.models.load import Head, load_tokenizer
from reroll.observe.metrics import Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.pipeline.planner import assign_devices
from reroll.pipeline.spawn import spawn_model
from reroll.runtime.base import Runtime
from reroll.tokens.batch import Batch
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Loss
from reroll.training.cluster import TrainCluster
from reroll.types import Message, Sample
from reroll_zoo.offline.config import OfflineConfig
from reroll_zoo.offline.sampler import RowSampler

OC = TypeVar("OC", bound=OfflineConfig)
R = TypeVar("R")


class OfflinePipeline(Pipeline[OC], Generic[OC, R]):
    """Subclasses say how rows become a batch, what the loss is, and what held-out rows tell."""

    loss: Loss

    def __init__(self, config: OC, context: RunContext, policy: TrainCluster, rows: RowSampler[R], held_out: list[R]) -> None:
        super().__init__(config, context)
        self.policy = policy
        self.rows = rows
        self.held_out = held_out
        self._rows_seen = rows.state()
        """Where the rows stood after the last finished step."""

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
        stats = await self.policy.train(batch, loss, seed=step) + Stats({"tokens": Sum(float(batch.num_tokens))})
        self._rows_seen = self.rows.state()
        return stats

    async def evaluate(self) -> Stats:
        if not self.held_out:
            return Stats()
        return (await self.measure(await self.batch_of(self.held_out))).prefixed("eval/")

    async def start(self, num_steps: int) -> None:
        return None

    async def finish(self) -> None:
        return None

    @property
    def eval_every(self) -> int:
        return self.config.eval_every

    def state(self) -> dict[str, Any]:
        return {"rows": self._rows_seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows.restore(state["rows"])
        self._rows_seen = self.rows.state()


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Conversations to rows with the loss on what the assistant says; `where` names their source in errors."""

    renderer: Renderer
    max_tokens: int
    where: str

    def row(self, number: int, messages: Sequence[Message], *, start: int = 0) -> Sample:
        """Row `number`, with the loss from message `start` on. One too long is an error: cut, it would teach half an answer."""
        ids, mask = self.renderer.training_row(messages, start=start)
        if len(ids) > self.max_tokens:
            raise DataError(
                f"{self.where}: row {number} has {len(ids)} tokens, more than max_tokens {self.max_tokens}: "
                "raise max_tokens, or drop the row"
            )
        return sft_sample(ids, mask)


async def open_policy(config: OfflineConfig, runtime: Runtime, *, head: Head = "language") -> TrainCluster:
    """The model that learns, with its optimizer where the planner puts it."""
    policy = assign_devices(config, num_gpus=runtime.num_gpus).policy
    return await spawn_model(runtime, policy, role="policy", total_steps=config.run.steps, head=head)


def load_rows(
    config: OfflineConfig, read: SourceRows, in_tokens: Callable[[Sequence[Any], Tokeniser], list[R]]
) -> tuple[RowSampler[R], list[R]]:
    """What `in_tokens` makes of the rows of each source: to train on, and held out. Sources in `read` are not read again."""
    renderer = Renderer(load_tokenizer(config.policy.model))
    rows = {
        where: in_tokens(
            read[where] if where in read else import_object(config.reads)(source), Tokeniser(renderer, config.max_tokens, where)
        )
        for where, source in config.data.named()
    }
    sources = [(rows[f"data.train.{index}"], source.weight) for index, source in enumerate(config.data.train)]
    held_out = [row for index, _ in enumerate(config.data.eval) for row in rows[f"data.eval.{index}"]]
    return RowSampler(sources, seed=config.run.seed, shuffle=config.data.shuffle), held_out
