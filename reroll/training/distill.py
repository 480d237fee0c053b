"""The loss of distillation: a distance from the teacher's distributions, and a share of plain imitation."""

from __future__ import annotations

from dataclasses import dataclass

from reroll.observe.metrics import Stats, Sum
from reroll.tokens.batch import Batch
from reroll.training.base import Divergence, LossOutput, MicroBatchLoss, Needs, Predictions, required
from reroll.training.loss import mean_of, reduced


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
