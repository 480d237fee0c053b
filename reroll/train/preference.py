"""Losses on preferences as plain data that travels to workers.

A pair is two neighbouring sequences of the batch, the chosen one first (`unit_size` 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reroll.algo.preference import PREFERENCES, bradley_terry, kto
from reroll.algo.segments import segment_sum
from reroll.observe.metrics import Last, Stats, Sum
from reroll.tokens.batch import Batch
from reroll.train.base import LossOutput, Needs, PlainLoss, Predictions, known
from reroll.train.loss import mean_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss(PlainLoss):
    """Makes the chosen answer likelier than the rejected one. The mean over pairs."""

    kind: str
    """A key of PREFERENCES."""
    options: Mapping[str, Any]
    """Keyword arguments of that loss; all have `beta`, which makes a log-ratio a reward."""
    uses_reference: bool = True
    length_normalised: bool = False

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        logp = known(model.logp)
        log_ratio = logp - known(batch.ref_logp) if self.uses_reference else logp
        per_answer = sequence_sums(log_ratio, batch)
        if self.length_normalised:
            per_answer = per_answer / sequence_sums(torch.ones_like(logp), batch).clamp(min=1)
        chosen, rejected = _sides(per_answer)
        loss = PREFERENCES[self.kind](chosen - rejected, **self.options).sum() / _num_pairs(batch)
        beta = self.options["beta"]
        stats = _pair_stats(loss, beta * chosen, beta * rejected)
        return LossOutput(loss, stats + _logp_stats(sequence_sums(logp, batch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingLoss(PlainLoss):
    """Makes the score of the chosen answer larger than that of the rejected one, by `batch.label`. The mean over pairs."""

    @property
    def needs(self) -> Needs:
        return Needs(logp=False, score=True)

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        chosen, rejected = _sides(known(model.score))
        margin, _ = _sides(known(batch.label))
        loss = bradley_terry(chosen, rejected, margin).sum() / _num_pairs(batch)
        return LossOutput(loss, _pair_stats(loss, chosen, rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss(PlainLoss):
    """Makes answers with label 1 likelier than they were, those with label -1 less likely. The mean over answers."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    reference_point: float = 0.0
    """How far the policy is from the reference, measured before the step."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        logp, is_good = known(model.logp), known(batch.label) > 0
        log_ratio = sequence_sums(logp - known(batch.ref_logp), batch)
        per_answer = kto(
            log_ratio,
            is_good,
            reference_point=self.reference_point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = per_answer.sum() / batch.num_sequences
        log_ratio = log_ratio.detach()
        is_right = torch.where(is_good, log_ratio > self.reference_point, log_ratio < self.reference_point)
        return LossOutput(
            loss,
            Stats(
                {
                    "loss": Sum(float(loss.detach())),
                    "accuracy": mean_of(is_right.float()),
                    "good_reward": mean_of(self.beta * log_ratio[is_good]),
                    "bad_reward": mean_of(self.beta * log_ratio[~is_good]),
                    "reference_point": Last(self.reference_point),
                }
            ),
        )


def sequence_sums(per_token: Tensor, batch: Batch) -> Tensor:
    """[T] -> [N]: the sum over each sequence's tokens in the loss."""
    return segment_sum(torch.where(batch.loss_mask, per_token, 0.0), batch.sequence_index, len(batch))


def _sides(per_sequence: Tensor) -> tuple[Tensor, Tensor]:
    """[N] -> [N / 2] each: of the chosen answers, and of the rejected ones."""
    return per_sequence[0::2], per_sequence[1::2]


def _num_pairs(batch: Batch) -> int:
    """Pairs of the whole batch that one optimizer step sees."""
    return batch.num_sequences // batch.unit_size


def _pair_stats(loss: Tensor, chosen: Tensor, rejected: Tensor) -> Stats:
    """`accuracy` is the share of pairs whose chosen answer has the larger reward."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return Stats(
        {
            "loss": Sum(float(loss.detach())),
            "accuracy": mean_of((chosen > rejected).float()),
            "margin": mean_of(chosen - rejected),
            "chosen_reward": mean_of(chosen),
            "rejected_reward": mean_of(rejected),
        }
    )


def _logp_stats(logp: Tensor) -> Stats:
    chosen, rejected = _sides(logp.detach())
    return Stats({"chosen_logp": mean_of(chosen), "rejected_logp": mean_of(rejected)})
