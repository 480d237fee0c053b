"""The losses of RL as plain data that travels to workers, and the functions a strategy differentiates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.algo.kl import KL_ESTIMATORS
from reroll.algo.losses import Mode, Tokens, aggregate, clipped_mask, value_loss
from reroll.config.formula import find_function
from reroll.config.imports import import_object
from reroll.config.losses import CorrectionConfig, LossConfig, RejectionConfig
from reroll.errors import SamplerMismatch
from reroll.observe.metrics import Max, Mean, Stats, Sum
from reroll.tokens.batch import Batch
from reroll.training.base import Divergence, LossOutput, MicroBatchLoss, Needs, Predictions, Weighting, required


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss with everything that is added to it. Terms that are off (coefficient 0) cost nothing."""

    kind: str
    """Of the group `reroll.losses`, or `module:function` of one of your own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    aggregation: Mode = "token_mean"
    length: int = 1
    """What `fixed_length` divides by."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    """A key of KL_ESTIMATORS, or `full` for the whole distribution (`batch.target_logp` is then the reference's)."""
    kl_times_ratio: bool = False
    """Each token's KL times its ratio to the old policy, with its gradient."""
    entropy_coef: float = 0.0
    selection: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the selection that belongs to the loss, if one does."""
    selects: str | None = None
    """`module:function` of that selection."""
    sees_entropy: bool = False
    """Whether the loss reads `Tokens.entropy`."""
    corrections: tuple[Weighting, ...] = ()
    """By how far the old policy is from the sampler."""
    rejections: tuple[Weighting, ...] = ()
    """By how far the policy is from the sampler, as it learns."""
    distill: Divergence | None = None
    """Distance from a teacher's distribution, weighed by `batch.target_weight`."""
    vocabulary: int | None = None
    """Ids that policy and teachers share."""
    value: ValueLoss | None = None
    """The loss of a critic that shares the policy's trunk."""
    value_coef: float = 0.0
    version: int | None = None
    """The weights that the update starts from: tokens that they wrote are reported on by themselves."""
    exact: bool = False
    """Whether the sampler's log-probs of those tokens must be the model's to the bit."""

    @property
    def needs(self) -> Needs:
        full = Divergence(kind="reverse_kl") if self.kl_coef and self.kl_estimator == "full" else None
        return Needs(
            entropy=self.entropy_coef != 0 or self.sees_entropy,
            divergence=self.distill or full,
            vocabulary=self.vocabulary,
            value=self.value is not None,
        )

    @property
    def compares_with_old_policy(self) -> bool:
        return True

    @property
    def function(self) -> Callable[..., Tensor]:
        return find_function(LossConfig.group, self.kind)

    def prepare(self, batch: Batch) -> Batch:
        if self.selects is None:
            return batch
        logp = batch.logp if batch.old_logp is None else batch.old_logp
        selected = import_object(self.selects)(logp, batch.advantage, batch.loss_mask, **self.selection)
        return batch.replace(selected=selected)

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        """Where `batch.old_logp` is None the policy has not moved yet: `logp` itself, held fixed, takes its place."""
        logp, mask = required(model.logp), batch.loss_mask
        old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
        tokens = _tokens(batch, logp, old_logp, model.entropy if self.sees_entropy else None)
        per_token = self.function(tokens, **self.options)
        stats = _stats(tokens, batch.logp, clipped_mask(per_token, tokens)) + self._gaps_by_age(batch, logp)
        places = mask, batch.sequence_index, batch.turn
        for one in self.corrections:
            function = find_function(CorrectionConfig.group, one.kind)
            weights, told = function(old_logp, batch.logp, *places, **one.options)
            per_token, stats = per_token * weights, stats + told
        for one in self.rejections:
            function = find_function(RejectionConfig.group, one.kind)
            weights, told = function(logp, batch.logp, batch.advantage, *places, **one.options)
            per_token, stats = per_token * weights, stats + told
        if self.kl_coef:
            kl = required(model.divergence) if self.kl_estimator == "full" else self._kl(batch, tokens)
            per_token = per_token + self.kl_coef * kl
            stats += Stats({"kl_ref": mean_of(kl.detach()[mask])})
        if self.distill:
            distance, weight = required(model.divergence), required(batch.target_weight)
            per_token = per_token + weight * distance
            stats += Stats({"teacher_divergence": mean_of(distance.detach()[mask & (weight > 0)])})
        if model.routes_differ is not None:
            stats += Stats({"routes_differ": mean_of(model.routes_differ[mask])})
        if self.entropy_coef:
            entropy = required(model.entropy)
            per_token = per_token - self.entropy_coef * entropy
            stats += Stats({"full_entropy": mean_of(entropy.detach()[mask])})
        loss = reduced(per_token, batch, mode=self.aggregation, length=self.length)
        if self.value:
            value_loss, value_stats = self.value(batch, model)
            loss = loss + self.value_coef * value_loss
            stats += Stats({"value_" + name: metric for name, metric in value_stats.items()})
        return LossOutput(loss, stats + Stats({"loss": Sum(float(loss.detach()))}))

    def _gaps_by_age(self, batch: Batch, logp: Tensor) -> Stats:
        """The gap to the sampler on tokens that the weights of now wrote, and on those of older ones."""
        if self.version is None or batch.version is None:
            return Stats()
        gap = (logp.detach() - batch.logp).abs()
        if self.exact:
            refuse_gap(gap, logp.detach(), batch, version=self.version)
        is_known = batch.loss_mask & (batch.version >= 0)
        ages = {"current": is_known & (batch.version == self.version), "stale": is_known & (batch.version < self.version)}
        return Stats({f"sampler_gap_{age}": mean_of(gap[mask]) for age, mask in ages.items() if mask.any()})

    def _kl(self, batch: Batch, tokens: Tokens) -> Tensor:
        if batch.ref_logp is None:
            raise ValueError("the loss has a KL penalty but the batch has no ref_logp: compute it with the reference model")
        kl = KL_ESTIMATORS[self.kl_estimator](tokens.logp, torch.where(tokens.mask, batch.ref_logp, 0.0))
        return kl * tokens.ratio if self.kl_times_ratio else kl


def refuse_gap(gap: Tensor, logp: Tensor, batch: Batch, *, version: int) -> None:
    """Raise SamplerMismatch, which names the first, if the sampler's log-probs of tokens by this version are not `logp`."""
    assert batch.version is not None
    wrong = (batch.loss_mask & (batch.version == version) & (gap != 0)).nonzero().squeeze(1)
    if not len(wrong):
        return
    token = int(wrong[0])
    raise SamplerMismatch(
        f"policy.exact: the engine's log-probs of {len(wrong):,} tokens by version {version} of the weights are not the "
        f"trainer's to the bit. The first is token {int(batch.positions[token])} (id {int(batch.ids[token])}) of row "
        f"{int(batch.sequence_index[token])} of a micro-batch of {len(batch)}: engine {float(batch.logp[token]):.9g}, trainer "
        f"{float(logp[token]):.9g}, and {float(gap.max()):.3g} nats is the largest gap. Nothing of this step is kept; the last "
        "checkpoint is intact. Look at what the push left behind if most tokens are off (weights, docs/weights.md); else this "
        "machine adds up in an order that was not foreseen: set policy.exact to false."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(MicroBatchLoss):
    """The loss by which a critic learns to predict returns. Every token weighs the same."""

    clip: float = math.inf

    @property
    def needs(self) -> Needs:
        return Needs(logp=False, value=True)

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        mask = batch.loss_mask
        value, old_value, returns = (
            torch.where(mask, required(values), 0.0) for values in (model.value, batch.value, batch.returns)
        )
        loss = reduced(value_loss(value, old_value, returns, clip=self.clip), batch, mode="token_mean")
        error = (returns - value.detach())[mask]
        stats = Stats({"error": mean_of(error.square()), "mean": mean_of(value.detach()[mask])})
        return LossOutput(loss, stats + Stats({"loss": Sum(float(loss.detach()))}))


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


def _tokens(batch: Batch, logp: Tensor, old_logp: Tensor, entropy: Tensor | None) -> Tokens:
    return Tokens(
        logp=logp,
        old_logp=old_logp,
        advantage=batch.advantage,
        mask=batch.loss_mask,
        sequence=batch.sequence_index,
        selected=batch.selected,
        sampler_logp=batch.logp,
        turn=batch.turn,
        entropy=entropy,
    )


def _stats(tokens: Tokens, sampler_logp: Tensor, is_clipped: Tensor) -> Stats:
    """How far the policy is from the old one and from the sampler. Ratios are bounded, as in the losses, and thus finite."""
    mask, logp = tokens.mask, tokens.logp.detach()
    if not mask.any():
        return Stats()
    from_old = tokens.log_ratio.detach()[mask]
    from_sampler = (logp - sampler_logp)[mask]
    ratio = from_old.exp()
    return Stats(
        {
            "ratio": mean_of(ratio),
            "ratio_max": Max(float(ratio.max())),
            "kl_old": mean_of(torch.expm1(from_old) - from_old),
            "sampler_gap": mean_of(from_sampler.abs()),
            "sampler_gap_max": Max(float(from_sampler.abs().max())),
            "entropy": mean_of(-logp[mask]),
            "clip_fraction": mean_of(is_clipped[mask]),
        }
    )
