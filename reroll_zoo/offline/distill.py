"""Distillation: at every token of the rows the student learns the teacher's distribution, not only the token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from reroll.models.load import shared_vocabulary
from reroll.observe.metrics import Last, Stats, Sum
from reroll.pipeline.base import RunContext
from reroll.pipeline.spawn import spawn_fixed
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Divergence, LossOutput, MicroBatchLoss, Needs, Predictions, required
from reroll.training.cluster import TrainCluster
from reroll.training.loss import mean_of, reduced
from reroll.types import Sample
from reroll_zoo.offline.config import DistillConfig
from reroll_zoo.offline.pipeline import OfflinePipeline, load_rows, open_policy
from reroll_zoo.offline.sampler import RowSampler
from reroll_zoo.offline.sft import imitation_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillLoss(MicroBatchLoss):
    """(1 - sft_weight) * temperature² * divergence + sft_weight * cross-entropy, over all tokens alike.

    `batch.target_logp` must be the teacher's at the same temperature and vocabulary; the cross-entropy is at the batch's
    temperature. Softening shrinks a gradient by about 1 / temperature²; the factor keeps the two terms in proportion.
    """

    divergence: Divergence
    temperature: float = 1.0
    vocabulary: int | None = None
    """Ids that student and teacher share."""
    sft_weight: float = 0.0

    @property
    def needs(self) -> Needs:
        return Needs(
            logp=self.sft_weight > 0,
            divergence=self.divergence,
            temperature=self.temperature,
            vocabulary=self.vocabulary,
        )

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        divergence, mask = required(model.divergence), batch.loss_mask
        per_token = (1 - self.sft_weight) * self.temperature**2 * divergence
        stats = Stats({"divergence": mean_of(divergence.detach()[mask])})
        if self.sft_weight:
            logp = required(model.logp)
            per_token = per_token - self.sft_weight * logp
            stats += Stats({"cross_entropy": mean_of(-logp.detach()[mask])})
        loss = reduced(per_token, batch, mode="token_mean")
        return LossOutput(loss, stats + Stats({"loss": Sum(float(loss.detach()))}))


class DistillPipeline(OfflinePipeline[DistillConfig, Sample]):
    """Train on the teacher's distributions for the rows. `vocabulary` is how many ids the two share."""

    config_class = DistillConfig
    title = "learning from a teacher"

    @classmethod
    @asynccontextmanager
    async def open(cls, config: DistillConfig, context: RunContext) -> AsyncIterator[Self]:
        # What does not fit ends the run before a model is loaded.
        vocabulary = shared_vocabulary(config.policy.model, config.teacher.model)
        rows, held_out = load_rows(config, context.rows, imitation_rows)
        async with make_runtime(config.runtime) as runtime:
            teacher = await spawn_fixed(runtime, config.teacher, role="teacher")
            policy = await open_policy(config, runtime)
            yield cls(config, context, policy, rows, held_out, teacher=teacher, vocabulary=vocabulary)

    def __init__(
        self,
        config: DistillConfig,
        context: RunContext,
        policy: TrainCluster,
        rows: RowSampler[Sample],
        held_out: list[Sample],
        *,
        teacher: TrainCluster,
        vocabulary: int,
    ) -> None:
        super().__init__(config, context, policy, rows, held_out)
        self.teacher = teacher
        self.asked_of_teacher = Needs(
            logp=False, top_k=config.teacher.top_k or vocabulary, temperature=config.temperature, vocabulary=vocabulary
        )
        self.loss = DistillLoss(
            divergence=Divergence(kind=config.divergence.kind, options=config.divergence.arguments),
            temperature=config.temperature,
            vocabulary=vocabulary,
            sft_weight=config.sft_weight,
        )

    async def batch_of(self, rows: Sequence[Sample]) -> Batch:
        batch = pack(rows)
        predictions = await self.teacher.predict(batch, self.asked_of_teacher)
        return batch.replace(target_ids=predictions.top_ids, target_logp=predictions.top_logp)

    async def measure(self, batch: Batch) -> Stats:
        predictions = await self.policy.predict(batch, replace(self.loss.needs, logp=True))
        tokens = batch.num_loss_tokens
        return Stats(
            {
                "divergence": Last(float(required(predictions.divergence).sum()) / tokens),
                "loss": Last(-float(required(predictions.logp).sum()) / tokens),
            }
        )
