"""Distillation: at every token of the rows the student learns the teacher's distribution, not only the token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from reroll.config.distill import DistillConfig
from reroll.data.sampler import Sampler
from reroll.models.vocabulary import shared_vocabulary
from reroll.observe.metrics import Last, Stats
from reroll.pipeline.base import RunContext
from reroll.pipeline.offline import OfflinePipeline, load_rows
from reroll.pipeline.sft import imitation_rows
from reroll.pipeline.spawn import spawn_fixed, spawn_model
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch, pack
from reroll.train.base import Divergence, Needs, known
from reroll.train.cluster import TrainCluster
from reroll.train.distill import DistillLoss
from reroll.types import Sample


class DistillPipeline(OfflinePipeline[DistillConfig, Sample]):
    """Ask the teacher about the rows, then come closer to what it said. `vocabulary` is how many ids the two share."""

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
        said = await self.teacher.predict(batch, self.asked_of_teacher)
        return batch.replace(teacher_ids=said.top_ids, teacher_logp=said.top_logp)

    async def measure(self, batch: Batch) -> Stats:
        said = await self.policy.predict(batch, replace(self.loss.needs, logp=True))
        tokens = batch.num_loss_tokens
        return Stats(
            {
                "divergence": Last(float(known(said.divergence).sum()) / tokens),
                "loss": Last(-float(known(said.logp).sum()) / tokens),
            }
        )


@asynccontextmanager
async def open_distill(config: DistillConfig, context: RunContext, code_folder: Path) -> AsyncIterator[DistillPipeline]:
    """Compare the vocabularies and tokenise every row before a model is loaded: what does not fit ends the run at once."""
    vocabulary = shared_vocabulary(config.policy.model, config.teacher.model)
    rows, held_out = load_rows(config, imitation_rows)
    async with make_runtime(config.runtime) as runtime:
        teacher = await spawn_fixed(runtime, config.teacher, role="teacher")
        policy = await spawn_model(runtime, config.policy, role="policy", total_steps=config.run.steps)
        yield DistillPipeline(config, context, policy, rows, held_out, teacher=teacher, vocabulary=vocabulary)
