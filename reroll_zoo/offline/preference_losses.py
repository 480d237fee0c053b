"""Losses on preferences as plain data that travels to workers.

A pair is two neighbouring sequences of the batch, the chosen one first (`unit_size` 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reroll.algo.segments import segment_sum
from reroll.observe.metrics import Last, Stats, Sum
from reroll.tokens.batch import Batch
from reroll.training.base import LossOutput, MicroBatchLoss, Needs, Predictions, required
from reroll.training.loss import mean_of
from reroll_zoo.offline.preference_formulas import PREFERENCES, bradley_terry, kto, log_odds, negative_log_likelihood


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss(MicroBatchLoss):
    """Makes the chosen answer likelier than the rejected one, and with `sft_coef` likelier as such. The mean over pairs."""

    kind: str
    """A key of PREFERENCES."""
    options: Mapping[str, Any]
    """Keyword arguments of that loss; all have `beta`, which makes a log-ratio a reward."""
    uses_reference: bool = True
    length_normalised: bool = False
    uses_odds: bool = False
    """Answers are compared by the log odds of their probabilities, not by the log of these."""
    sft_coef: float = 0.0
    """How much the negative log-likelihood of the chosen answer counts, per token whatever `length_normalised` says."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        logp = required(model.logp)
        log_ratio = logp - required(batch.ref_logp) if self.uses_reference else logp
        per_answer, sums = sequence_sums(log_ratio, batch), sequence_sums(logp, batch)
        num_tokens = sequence_sums(torch.ones_like(logp), batch).clamp(min=1)
        if self.length_normalised:
            per_answer = per_answer / num_tokens
        if self.uses_odds:
            per_answer = log_odds(per_answer)
        chosen, rejected = _sides(per_answer)
        per_pair = PREFERENCES[self.kind](chosen - rejected, **self.options)
        stats = _logp_stats(sums)
        if self.sft_coef:
            nll, _ = _sides(negative_log_likelihood(sums, num_tokens))
            stats += Stats({"preference_loss": mean_of(per_pair.detach()), "sft_loss": mean_of(nll.detach())})
            per_pair = per_pair + self.sft_coef * nll
        loss = per_pair.sum() / _num_pairs(batch)
        beta = self.options["beta"]
        return LossOutput(loss, _pair_stats(loss, beta * chosen, beta * rejected) + stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingLoss(MicroBatchLoss):
    """Makes the score of the chosen answer larger than that of the rejected one, by `batch.label`. The mean over pairs."""

    @property
    def needs(self) -> Needs:
        return Needs(logp=False, score=True)

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        chosen, rejected = _sides(required(model.score))
        margin, _ = _sides(required(batch.label))
        loss = bradley_terry(chosen, rejected, margin).sum() / _num_pairs(batch)
        return LossOutput(loss, _pair_stats(loss, chosen, rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss(MicroBatchLoss):
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
        logp, is_good = required(model.logp), required(batch.label) > 0
        log_ratio = sequence_sums(logp - required(batch.ref_logp), batch)
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
