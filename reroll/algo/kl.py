"""Per-token estimates of KL(policy || reference) from samples of the policy, all [T] -> [T]; and a coefficient that adapts.

With d = logp - ref_logp, k1 and k3 have the right mean, k2 a small bias. As a penalty that is differentiated through
`logp` they pull differently: k2's gradient is that of the true KL, k3's is close to it near the reference, and k1's
is zero on average (the mean of grad log p), so k1 is for measuring, or for a penalty in the reward, rather than for a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_MAX_DIFFERENCE = 20.0
_MAX_LOW_VARIANCE = 10.0


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """d: unbiased, high variance, negative for half of the tokens."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """d² / 2: never negative, biased where the policies are far apart."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative."""
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


def low_variance(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 with d held within ± 20 and the result at most 10, so that one token cannot outweigh a batch.

    A token at the bound (d below -2.6 or above 11) has no gradient.
    """
    difference = (logp - ref_logp).clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
    return k3(difference, torch.zeros_like(difference)).clamp(max=_MAX_LOW_VARIANCE)


def absolute(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """|d|: not an estimate of the KL but a distance, with a pull back that is equally strong everywhere."""
    return (logp - ref_logp).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_variance": low_variance,
    "abs": absolute,
}
"""By config name."""


def adapted_coef(coef: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """The coefficient after a step that measured this KL: larger above the target, smaller below it (arXiv 1909.08593).

    coef × (1 + clip(kl / target - 1, ± 0.2) × num_samples / horizon): over `horizon` samples, a KL that is 20 % or more off
    moves it by 20 %. One step moves it by no more than that, however many samples it has.
    """
    if math.isnan(kl):
        raise ValueError("the measured KL is not a number, and a coefficient that followed it would never be one again")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(num_samples / horizon, 1.0))
