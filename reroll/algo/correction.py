"""Weights for tokens that another policy sampled than the one the update starts from.

The sampler's log-probs differ from the trainer's where the samples are stale, the precisions or kernels differ, or the
sampler cut its distribution. A weight is trainer / sampler, taken over a token, a turn or a sequence, then bounded.
A loss times its weight is corrected; several corrections are stacked by multiplying their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reroll.algo.kl import k3
from reroll.algo.segments import segment_sum

Level = Literal["token", "turn", "sequence", "geometric"]
Bound = Literal["truncate", "mask", "reject"]

_MAX_LOG_WEIGHT = 20.0
"""Log ratios of tokens and of units are held within ± this, so that no weight overflows."""


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
    geometric: the geometric mean over its sequence.
    mode: truncate, min(w, high); mask, w inside [low, high] and 0 outside; reject, 1 inside and 0 outside.

    The means, over the units of the level that have a token in the loss: `weight`, before the bound; `bounded`, the share
    beyond the bounds; `effective`, the effective sample size of the bounded weights, (sum w)² / sum w², as a share of
    the units (exact for what was passed; parts of a batch average). Over tokens: `kl`, k3 of KL(sampler || trainer).
    """
    log_ratio = torch.where(mask, old_logp - sampler_logp, 0.0).clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
    unit, num_units = _units(sequence, turn, level)
    num_tokens = segment_sum(mask.to(log_ratio.dtype), unit, num_units)
    log_weight = segment_sum(log_ratio, unit, num_units)
    if level == "geometric":
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


def _units(sequence: Tensor, turn: Tensor, level: Level) -> tuple[Tensor, int]:
    """[T] which unit of the level a token belongs to, and how many there are."""
    if level == "token":
        return torch.arange(len(sequence), device=sequence.device), len(sequence)
    if level == "turn":
        distinct, unit = torch.unique(torch.stack([sequence, turn]), dim=1, return_inverse=True)
        return unit, distinct.shape[1]
    return sequence, int(sequence[-1]) + 1


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
