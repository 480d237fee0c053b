"""Distillation: at every token of the rows the student learns the teacher's distribution, not only the token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from reroll.config.distill import DistillConfig
from reroll.data.sampler import Sampler
from reroll.models.load import shared_vocabulary
from reroll.observe.metrics import Last, Stats
from reroll.pipeline.base import RunContext
from reroll.pipeline.offline import OfflinePipeline, load_rows
from reroll.pipeline.sft import imitation_rows
from reroll.pipeline.spawn import spawn_fixed, spawn_model
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Divergence, Needs, required
from reroll.training.cluster import TrainCluster
from reroll.training.loss import DistillLoss
from reroll.types import Sample


class DistillPipeline(OfflinePipeline[DistillConfig, Sample]):
    """Train on the teacher's distributions for the rows. `vocabulary` is how many ids the two share."""

    config_class = DistillConfig
    title = "learning from a teacher"

    @classmethod
    @asynccontextmanager
    async def open(cls, config: DistillConfig, context: RunContext) -> AsyncIterator[Self]:
        # What does not fit ends the run before a model is loaded.
        vocabulary = shared_vocabulary(config.policy.model, config.teacher.model)
        rows, held_out = load_rows(config, imitation_rows)
        async with make_runtime(config.runtime) as runtime:
            teacher = await spawn_fixed(runtime, config.teacher, role="teacher")
            policy = await spawn_model(runtime, config.policy, role="policy", total_steps=config.run.steps)
            yield cls(config, context, policy, rows, held_out, teacher=teacher, vocabulary=vocabulary)

    def __init__(
        self,
        config: DistillConfig,
        context: RunContext,
        policy: TrainCluster,
        rows: Sampler[Sample],
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
            divergence=Divergence(kind=config.divergence.kind, options=config.divergence.options),
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
