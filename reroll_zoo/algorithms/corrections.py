"""Weights for tokens that another policy sampled than the one that learns, and which of them are better left out.

The sampler's log-probs differ from the trainer's where the samples are stale, or the precisions or kernels differ. (Not where
the sampler cut its distribution, top-p or top-k: its log-probs are from before the cut.) A weight is trainer / sampler,
taken over a token, a turn or a sequence, then bounded. A loss times its weight is corrected; several corrections are
stacked by multiplying their weights, and a rejection is a weight of 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from reroll.algo.kl import KL_ESTIMATORS, k3
from reroll.algo.segments import Level as Unit
from reroll.algo.segments import segment_sum, units_of
from reroll.observe.metrics import Max, Mean, Stats
from reroll.training.base import TokenWeights

Level = Literal["token", "turn", "geometric_turn", "sequence", "geometric"]
Bound = Literal["truncate", "mask", "reject"]
Distance = Literal["k1", "k2", "k3"]
Take = Literal["mean", "sum", "max"]

_UNITS: dict[Level, Unit] = {
    "token": "token",
    "turn": "turn",
    "geometric_turn": "turn",
    "sequence": "sequence",
    "geometric": "sequence",
}
_GEOMETRIC = ("geometric", "geometric_turn")

_MAX_LOG_WEIGHT = 20.0
"""Log ratios of tokens and of units are held within ± this, so that no weight overflows."""


def importance(
    old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, sequence: Tensor, turn: Tensor, **options: Any
) -> TokenWeights:
    """`correct`, reported by level and mode: `weight` before the bound, `bounded`, the share beyond it, `effective`, the share
    of samples left."""
    correction = correct(old_logp, sampler_logp, mask, sequence, turn, **options)
    prefix = f"correction_{options['level']}_{options['mode']}_"
    means = {prefix + name: Mean(*pair) for name, pair in correction.means.items()}
    return TokenWeights(correction.weight, Stats(means) + Stats({prefix + "weight_max": Max(correction.weight_max)}))


def distance(
    logp: Tensor, sampler_logp: Tensor, advantage: Tensor, mask: Tensor, sequence: Tensor, turn: Tensor, **options: Any
) -> TokenWeights:
    """`reject`, reported by level, what is taken and of which distance: `distance`, of the level's units, `rejected`, the share
    of tokens."""
    rejection = reject(logp, sampler_logp, advantage, mask, sequence, turn, **options)
    prefix = f"rejection_{options['level']}_{options['take']}_{options['distance']}_"
    return TokenWeights(rejection.weight, Stats({prefix + name: Mean(*pair) for name, pair in rejection.means.items()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights, and what they tell about how far sampler and trainer are apart."""

    weight: Tensor
    """[T], no gradient; 0 off the mask."""
    means: dict[str, tuple[float, float]]
    """(sum, count) by name, such that parts of a batch add up; see `correct`."""
    weight_max: float
    """The largest weight before it was bounded; 0 where nothing is in the loss."""


@torch.no_grad()
def correct(
    old_logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    sequence: Tensor,
    turn: Tensor,
    *,
    level: Level,
    mode: Bound,
    low: float,
    high: float,
) -> Correction:
    """Bounded importance weights of the tokens in the loss. All tensors [T]; `turn` counts within a sequence.

    level: whose ratio a token gets. token: its own. turn, sequence: the product over the tokens of its turn, or sequence.
    geometric_turn, geometric: the geometric mean over its turn, or sequence.
    mode: truncate, min(w, high); mask, w inside [low, high] and 0 outside; reject, 1 inside and 0 outside.

    The means, over the units of the level that have a token in the loss: `weight`, before the bound; `bounded`, the share
    beyond the bounds; `effective`, the effective sample size of the bounded weights, (sum w)² / sum w², as a share of
    the units (exact for what was passed; parts of a batch average). Over tokens: `kl`, k3 of KL(sampler || trainer).
    """
    log_ratio = torch.where(mask, old_logp - sampler_logp, 0.0).clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
    unit, num_units = units_of(sequence, turn, _UNITS[level])
    num_tokens = segment_sum(mask.to(log_ratio.dtype), unit, num_units)
    log_weight = segment_sum(log_ratio, unit, num_units)
    if level in _GEOMETRIC:
        log_weight = log_weight / num_tokens.clamp(min=1)
    weight = log_weight.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()
    bounded = _bounded(weight, mode=mode, low=low, high=high)
    beyond = weight > high if mode == "truncate" else (weight < low) | (weight > high)
    in_loss = num_tokens > 0
    return Correction(
        weight=torch.where(mask, bounded[unit], 0.0),
        means={
            "weight": _sum_and_count(weight[in_loss]),
            "bounded": _sum_and_count(beyond[in_loss]),
            "effective": _effective(bounded[in_loss]),
            "kl": _sum_and_count(k3(torch.zeros_like(log_ratio), log_ratio)[mask]),
        },
        weight_max=float(weight[in_loss].max()) if bool(in_loss.any()) else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Which tokens are left in, and how far sampler and policy are apart."""

    weight: Tensor
    """[T], no gradient: 1 for tokens that count, 0 for those rejected and off the mask."""
    means: dict[str, tuple[float, float]]
    """(sum, count) by name, such that parts of a batch add up; see `reject`."""


@torch.no_grad()
def reject(
    logp: Tensor,
    sampler_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    sequence: Tensor,
    turn: Tensor,
    *,
    distance: Distance,
    level: Unit,
    take: Take,
    high: float,
    only_negative: bool,
) -> Rejection:
    """Leaves out the tokens of units in which the policy is further than `high` from the one that sampled. All tensors [T].

    With d = log sampler - log policy, the distance of a token is d (k1), d² / 2 (k2) or exp(-d) - 1 + d (k3): estimates of
    KL(sampler || policy). That of a turn or a sequence is the mean, the sum or the largest of its tokens in the loss.
    only_negative: none but tokens with a negative advantage are left out. With k1 and the mean over a sequence that is
    the off-policy mask of DeepSeek-V3.2 (arXiv 2512.02556): what is bad, and has become unlikely, teaches nothing.

    The means: `distance` over the units that have a token in the loss, `rejected` the share of tokens.
    """
    difference = torch.where(mask, sampler_logp - logp, 0.0).clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
    per_token = KL_ESTIMATORS[distance](difference, torch.zeros_like(difference))
    unit, num_units = units_of(sequence, turn, level)
    value, in_loss = _taken(per_token[mask], unit[mask], num_units, take)
    rejected = mask & (value > high)[unit]
    if only_negative:
        rejected &= advantage < 0
    return Rejection(
        weight=(mask & ~rejected).to(logp.dtype),
        means={"distance": _sum_and_count(value[in_loss]), "rejected": _sum_and_count(rejected[mask])},
    )


def _taken(values: Tensor, unit: Tensor, num_units: int, take: Take) -> tuple[Tensor, Tensor]:
    """[num_units] what is taken of each unit's values, 0 of none; and which units have any."""
    num = segment_sum(torch.ones_like(values), unit, num_units)
    if take == "max":
        return torch.zeros_like(num).scatter_reduce(0, unit, values, "amax", include_self=False), num > 0
    total = segment_sum(values, unit, num_units)
    return (total / num.clamp(min=1) if take == "mean" else total), num > 0


def _bounded(weight: Tensor, *, mode: Bound, low: float, high: float) -> Tensor:
    if mode == "truncate":
        return weight.clamp(max=high)
    inside = (weight >= low) & (weight <= high)
    return weight * inside if mode == "mask" else inside.to(weight.dtype)


def _sum_and_count(values: Tensor) -> tuple[float, float]:
    return float(values.sum(dtype=torch.float64)), float(values.numel())


def _effective(weight: Tensor) -> tuple[float, float]:
    """Effective sample size and number of samples. Weights that are all 0 are worth none."""
    squares = float(weight.square().sum(dtype=torch.float64))
    total, num = _sum_and_count(weight)
    return (total**2 / squares if squares else 0.0), num
