"""The losses of RL as plain data that travels to workers, and the functions a strategy differentiates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.algo.correction import Correction, correct
from reroll.algo.kl import KL_ESTIMATORS
from reroll.algo.losses import LOSSES, Tokens, held_back, value_loss
from reroll.algo.reduce import Mode, aggregate
from reroll.algo.selection import SELECTIONS
from reroll.config.imports import import_object
from reroll.observe.metrics import Max, Mean, Stats, Sum
from reroll.tokens.batch import Batch
from reroll.train.base import Divergence, LossOutput, Needs, PlainLoss, Predictions, known


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss with everything that is added to it. Terms that are off (coefficient 0) cost nothing."""

    kind: str
    """A key of LOSSES, or `module:function` of one of your own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    aggregation: Mode = "token_mean"
    length: int = 1
    """What `fixed_length` divides by."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    """A key of KL_ESTIMATORS, or `full` for the whole distribution (`batch.teacher_logp` is then the reference's)."""
    entropy_coef: float = 0.0
    selection: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the selection that belongs to the loss, if one does."""
    corrections: tuple[Mapping[str, Any], ...] = ()
    """Keyword arguments of `correct`, one for each weight."""
    value: ValueLoss | None = None
    """The loss of a critic that shares the policy's trunk."""
    value_coef: float = 0.0

    @property
    def needs(self) -> Needs:
        full = Divergence(kind="reverse_kl") if self.kl_coef and self.kl_estimator == "full" else None
        return Needs(entropy=self.entropy_coef != 0, divergence=full, value=self.value is not None)

    @property
    def compares_with_old_policy(self) -> bool:
        return True

    @property
    def function(self) -> Callable[..., Tensor]:
        return import_object(self.kind) if ":" in self.kind else LOSSES[self.kind]

    def prepare(self, batch: Batch) -> Batch:
        if self.kind not in SELECTIONS:
            return batch
        logp = batch.logp if batch.old_logp is None else batch.old_logp
        return batch.replace(selected=SELECTIONS[self.kind](logp, batch.advantage, batch.loss_mask, **self.selection))

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        """Where `batch.old_logp` is None the policy has not moved yet: `logp` itself, held fixed, takes its place."""
        logp, mask = known(model.logp), batch.loss_mask
        old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
        tokens = _tokens(batch, logp, old_logp)
        per_token = self.function(tokens, **self.options)
        stats = _stats(batch, logp.detach(), old_logp, held_back(per_token, tokens))
        for options in self.corrections:
            correction = correct(old_logp, batch.logp, mask, batch.sequence_index, batch.turn, **options)
            per_token = per_token * correction.weight
            stats += _correction_stats(correction, options)
        if self.kl_coef:
            kl = known(model.divergence) if self.kl_estimator == "full" else self._kl(batch, logp)
            per_token = per_token + self.kl_coef * kl
            stats += Stats({"kl_ref": mean_of(kl.detach()[mask])})
        if self.entropy_coef:
            entropy = known(model.entropy)
            per_token = per_token - self.entropy_coef * entropy
            stats += Stats({"full_entropy": mean_of(entropy.detach()[mask])})
        loss = reduced(per_token, batch, mode=self.aggregation, length=self.length)
        if self.value:
            value_loss, value_stats = self.value(batch, model)
            loss = loss + self.value_coef * value_loss
            stats += Stats({"value_" + name: metric for name, metric in value_stats.items()})
        return LossOutput(loss, stats + Stats({"loss": Sum(float(loss.detach()))}))

    def _kl(self, batch: Batch, logp: Tensor) -> Tensor:
        if batch.ref_logp is None:
            raise ValueError("the loss has a KL penalty but the batch has no ref_logp: compute it with the reference model")
        return KL_ESTIMATORS[self.kl_estimator](logp, batch.ref_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(PlainLoss):
    """How a critic learns to foretell returns. Every token weighs the same."""

    clip: float = math.inf

    @property
    def needs(self) -> Needs:
        return Needs(logp=False, value=True)

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        value, returns, mask = known(model.value), known(batch.returns), batch.loss_mask
        loss = reduced(value_loss(value, known(batch.value), returns, clip=self.clip), batch, mode="token_mean")
        error = (returns - value.detach())[mask]
        told = Stats({"error": mean_of(error.square()), "mean": mean_of(value.detach()[mask])})
        return LossOutput(loss, told + Stats({"loss": Sum(float(loss.detach()))}))


SFT_LOSS = PolicyLoss(kind="reinforce")
"""With advantage 1 on every token: the mean cross-entropy."""


def reduced(per_token: Tensor, batch: Batch, *, mode: Mode, length: int = 1) -> Tensor:
    """[T] -> scalar, with the batch's masks and global denominators."""
    return aggregate(
        per_token,
        batch.loss_mask,
        batch.sequence_index,
        mode=mode,
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=batch.num_sequences,
        length=length,
    )


def mean_of(values: Tensor) -> Mean:
    """Their mean as a metric; no values weigh nothing."""
    return Mean(float(values.sum(dtype=torch.float64)), float(values.numel()))


def _tokens(batch: Batch, logp: Tensor, old_logp: Tensor) -> Tokens:
    return Tokens(
        logp=logp,
        old_logp=old_logp,
        advantage=batch.advantage,
        mask=batch.loss_mask,
        sequence=batch.sequence_index,
        selected=batch.selected,
    )


def _correction_stats(correction: Correction, options: Mapping[str, Any]) -> Stats:
    """By level and mode: `weight` before the bound, `bounded`, the share beyond it, `effective`, the share of samples left."""
    prefix = f"correction_{options['level']}_{options['mode']}_"
    means = {prefix + name: Mean(*pair) for name, pair in correction.means.items()}
    return Stats(means) + Stats({prefix + "weight_max": Max(correction.weight_max)})


def _stats(batch: Batch, logp: Tensor, old_logp: Tensor, is_held_back: Tensor) -> Stats:
    mask = batch.loss_mask
    if not mask.any():
        return Stats()
    from_old = (logp - old_logp)[mask]
    from_sampler = (logp - batch.logp)[mask]
    ratio = from_old.exp()
    return Stats(
        {
            "ratio": mean_of(ratio),
            "ratio_max": Max(float(ratio.max())),
            "kl_old": mean_of(torch.expm1(from_old) - from_old),
            "sampler_gap": mean_of(from_sampler.abs()),
            "sampler_gap_max": Max(float(from_sampler.abs().max())),
            "entropy": mean_of(-logp[mask]),
            "clip_fraction": mean_of(is_held_back[mask]),
        }
    )
