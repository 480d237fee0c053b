"""Policy losses, one value per token. Masking and reduction are `reduce.aggregate`'s job."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def ppo(logp: Tensor, old_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logp - old_logp). [T] -> [T].

    A token whose ratio has already gone too far in the direction its advantage wants has no gradient.
    """
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def reinforce(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
    """-A * logp. [T] -> [T]. `old_logp` has no part in it; with advantage 1 this is the cross-entropy of SFT."""
    return -advantage * logp


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": ppo,
    "reinforce": reinforce,
}
"""By config kind; called as `LOSSES[kind](logp, old_logp, advantage, **options)` with the config's other fields."""
