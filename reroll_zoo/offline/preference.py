"""Learning from preferences: policies by the DPO family or KTO, and reward models by ranking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, Self, TypeVar

import numpy as np
import torch

from reroll.errors import DataError
from reroll.observe.metrics import Stats
from reroll.pipeline.base import RunContext
from reroll.pipeline.spawn import reference_of
from reroll.runtime import make_runtime
from reroll.runtime.base import Runtime
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import sft_sample
from reroll.training.base import Loss, required
from reroll.training.cluster import TrainCluster
from reroll.types import Message, Sample
from reroll_zoo.offline.config import OfflineConfig
from reroll_zoo.offline.pipeline import OfflinePipeline, Tokeniser, load_rows, open_policy
from reroll_zoo.offline.preference_config import DpoConfig, KtoLossConfig, PairLossConfig, RewardModelConfig
from reroll_zoo.offline.preference_formulas import kto_reference_point
from reroll_zoo.offline.preference_losses import KtoLoss, PreferenceLoss, RankingLoss, sequence_sums
from reroll_zoo.offline.rows import JudgedAnswer, Pair
from reroll_zoo.offline.sampler import RowSampler

OC = TypeVar("OC", bound=OfflineConfig)
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A pair in tokens, with the loss on the answers."""

    chosen: Sample
    rejected: Sample
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """A judged answer in tokens, with the loss on the answer."""

    sample: Sample
    is_good: bool


class PreferencePipeline(OfflinePipeline[OC, R], Generic[OC, R]):
    """Held-out rows are measured by the statistics of the loss."""

    def __init__(
        self,
        config: OC,
        context: RunContext,
        policy: TrainCluster,
        rows: RowSampler[R],
        held_out: list[R],
        *,
        loss: Loss,
        reference: TrainCluster | None = None,
    ) -> None:
        super().__init__(config, context, policy, rows, held_out)
        self.loss = loss
        self.reference = reference
        """The policy as it started: a model of its own, or the policy itself where it trains an adapter."""

    async def measure(self, batch: Batch) -> Stats:
        loss = await self.loss_on(batch)
        return loss(batch, await self.policy.predict(batch, loss.needs)).stats

    async def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference's log-probs, if there is one."""
        if self.reference is None:
            return batch
        return batch.replace(ref_logp=await self.reference.logprobs(batch, adapter=False))


class DpoPipeline(PreferencePipeline[DpoConfig, PairRow]):
    """Make chosen answers likelier than rejected ones."""

    config_class = DpoConfig
    title = "learning from preferences"

    @classmethod
    @asynccontextmanager
    async def open(cls, config: DpoConfig, context: RunContext) -> AsyncIterator[DpoPipeline | KtoPipeline]:
        if isinstance(config.loss, KtoLossConfig):
            async with KtoPipeline.open(config, context) as pipeline:
                yield pipeline
            return
        pairs, held_out = load_rows(config, context.rows, pair_rows)  # A bad row ends the run before a model is loaded.
        async with make_runtime(config.runtime) as runtime:
            policy, reference = await _policy_and_reference(config, runtime)
            yield cls(config, context, policy, pairs, held_out, loss=pair_loss(config.loss), reference=reference)

    async def batch_of(self, rows: Sequence[PairRow]) -> Batch:
        return await self.with_reference(pack_pairs(rows))


class KtoPipeline(PreferencePipeline[DpoConfig, JudgedRow]):
    """Make good answers likelier and bad ones less likely."""

    config_class = DpoConfig
    title = "learning from judged answers"
    loss: KtoLoss

    @classmethod
    @asynccontextmanager
    async def open(cls, config: DpoConfig, context: RunContext) -> AsyncIterator[Self]:
        assert isinstance(config.loss, KtoLossConfig)
        rows, held_out = load_rows(config, context.rows, judged_rows)
        if len(held_out) == 1:
            raise DataError("data.eval: one row is not enough for kto, which also looks at answers to other prompts (add rows)")
        async with make_runtime(config.runtime) as runtime:
            policy, reference = await _policy_and_reference(config, runtime)
            yield cls(config, context, policy, rows, held_out, loss=KtoLoss(**config.loss.options), reference=reference)

    async def batch_of(self, rows: Sequence[JudgedRow]) -> Batch:
        batch = pack([row.sample for row in rows])
        return await self.with_reference(batch.replace(label=torch.tensor([1.0 if row.is_good else -1.0 for row in rows])))

    async def loss_on(self, batch: Batch) -> Loss:
        others = await self.with_reference(mismatched(batch))
        log_ratio = await self.policy.logprobs(others) - required(others.ref_logp)
        return replace(self.loss, reference_point=kto_reference_point(sequence_sums(log_ratio, others)))


class RewardModelPipeline(PreferencePipeline[RewardModelConfig, PairRow]):
    """Score chosen answers higher than rejected ones."""

    config_class = RewardModelConfig
    title = "training a reward model"

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RewardModelConfig, context: RunContext) -> AsyncIterator[Self]:
        rows, held_out = load_rows(config, context.rows, pair_rows)
        async with make_runtime(config.runtime) as runtime:
            policy = await open_policy(config, runtime, head="score")
            yield cls(config, context, policy, rows, held_out, loss=RankingLoss())

    async def batch_of(self, rows: Sequence[PairRow]) -> Batch:
        return pack_pairs(rows)


async def _policy_and_reference(config: DpoConfig, runtime: Runtime) -> tuple[TrainCluster, TrainCluster | None]:
    policy = await open_policy(config, runtime)
    return policy, await reference_of(runtime, config.policy, policy) if config.loss.uses_reference else None


def pair_loss(config: PairLossConfig) -> PreferenceLoss:
    """The loss that a config node names."""
    return PreferenceLoss(
        kind=config.kind,
        options=config.options,
        uses_reference=config.uses_reference,
        length_normalised=config.length_normalised,
        uses_odds=config.uses_odds,
        sft_coef=config.sft_coef,
    )


def pack_pairs(rows: Sequence[PairRow]) -> Batch:
    """Chosen and rejected in turn, never parted; the label of both is the pair's margin."""
    batch = pack([sample for row in rows for sample in (row.chosen, row.rejected)])
    margins = torch.tensor([row.margin for row in rows], dtype=torch.float32)
    return batch.replace(unit_size=2, label=margins.repeat_interleave(2))


def mismatched(batch: Batch) -> Batch:
    """Every prompt with the answer of the next row; the last one with that of the first."""
    rows = [slice(start, end) for start, end in pairwise(batch.cu_seqlens.tolist())]
    ids, masks = ([values[row].numpy() for row in rows] for values in (batch.ids, batch.loss_mask))
    answers_at = [int(mask.argmax()) for mask in masks]
    samples = []
    for row, start in enumerate(answers_at):
        other = (row + 1) % len(rows)
        answer = slice(answers_at[other], None)
        mask = np.concatenate([np.zeros(start, dtype=np.bool_), masks[other][answer]])
        samples.append(sft_sample(np.concatenate([ids[row][:start], ids[other][answer]]).tolist(), mask.tolist()))
    return pack(samples)


def pair_rows(pairs: Sequence[Pair], tokeniser: Tokeniser) -> list[PairRow]:
    """Pairs in tokens."""
    return [
        PairRow(
            chosen=_answered(tokeniser, number, pair.prompt, pair.chosen),
            rejected=_answered(tokeniser, number, pair.prompt, pair.rejected),
            margin=pair.margin,
        )
        for number, pair in enumerate(pairs, start=1)
    ]


def judged_rows(answers: Sequence[JudgedAnswer], tokeniser: Tokeniser) -> list[JudgedRow]:
    """Judged answers in tokens."""
    return [
        JudgedRow(sample=_answered(tokeniser, number, row.prompt, row.answer), is_good=row.is_good)
        for number, row in enumerate(answers, start=1)
    ]


def _answered(tokeniser: Tokeniser, number: int, prompt: tuple[Message, ...], answer: tuple[Message, ...]) -> Sample:
    """A prompt and an answer, with the loss on the answer alone."""
    return tokeniser.row(number, [*prompt, *answer], start=len(prompt))
