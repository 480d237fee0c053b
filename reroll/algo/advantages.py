"""Rewards of sibling trajectories to advantages. Pure functions of [G] tensors, one group at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def grpo(rewards: Tensor, *, epsilon: float) -> Tensor:
    """(reward - mean) / (sample standard deviation + epsilon). [G] -> [G].

    A group of one and a group whose rewards are all equal say nothing about what is better: zeros.
    """
    centred = group_mean(rewards)
    if not centred.any():
        return centred
    return centred / (rewards.std() + epsilon)


def group_mean(rewards: Tensor) -> Tensor:
    """Reward - mean. [G] -> [G]. A group of one and a group whose rewards are all equal give exact zeros."""
    if (rewards == rewards[0]).all():  # The rounded mean of equal rewards need not equal them.
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "group_mean": group_mean,
}
"""By config kind; called as `ADVANTAGES[kind](rewards, **options)` with the config's other fields."""
