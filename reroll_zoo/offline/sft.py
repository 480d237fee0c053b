"""Supervised fine-tuning: the same batches, strategy and loop; the loss is on the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from reroll.observe.metrics import Last, Stats
from reroll.pipeline.base import RunContext
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch, pack
from reroll.training.loss import SFT_LOSS
from reroll.types import Message, Sample
from reroll_zoo.offline.config import SftConfig
from reroll_zoo.offline.pipeline import OfflinePipeline, Tokeniser, load_rows, open_policy

SHOWN = {f"train/{name}" for name in ("loss", "grad_norm", "lr", "loss_tokens", "tokens_per_s")}


class SftPipeline(OfflinePipeline[SftConfig, Sample]):
    """Imitate the rows."""

    config_class = SftConfig
    title = "supervised fine-tuning"
    loss = SFT_LOSS

    @classmethod
    @asynccontextmanager
    async def open(cls, config: SftConfig, context: RunContext) -> AsyncIterator[Self]:
        # Every row is tokenised before the model is loaded: a bad one ends the run at once.
        rows, held_out = load_rows(config, context.rows, imitation_rows)
        async with make_runtime(config.runtime) as runtime:
            policy = await open_policy(config, runtime)
            yield cls(config, context, policy, rows, held_out)

    async def batch_of(self, rows: Sequence[Sample]) -> Batch:
        return pack(rows)

    async def measure(self, batch: Batch) -> Stats:
        logp = await self.policy.logprobs(batch)
        return Stats({"loss": Last(-float(logp.sum()) / batch.num_loss_tokens)})

    async def step(self, step: int) -> Stats:
        # Nobody sampled these tokens: what compares the policy with a sampler says nothing here.
        stats = await super().step(step)
        return Stats({name: stats[name] for name in stats if name in SHOWN or name == "tokens" or name.startswith("time/")})


def imitation_rows(conversations: Sequence[Sequence[Message]], tokeniser: Tokeniser) -> list[Sample]:
    """Conversations in tokens, with the loss on all that the assistant says."""
    return [tokeniser.row(number, conversation) for number, conversation in enumerate(conversations, start=1)]
