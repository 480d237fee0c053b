"""Per-token estimates of KL(policy || reference) from samples of the policy, all [T] -> [T].

With d = logp - ref_logp, k1 and k3 have the right mean, k2 a small bias. As a penalty that is differentiated through
`logp` they pull differently: k2's gradient is that of the true KL, k3's is close to it near the reference, and k1's
is zero on average (the mean of grad log p), so k1 is for measuring rather than for training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """d: unbiased, high variance, negative for half of the tokens."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """d² / 2: never negative, biased where the policies are far apart."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative."""
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By config name."""
