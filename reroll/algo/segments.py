"""Sums, means and deviations of parts of a flat tensor: tokens of a sequence, turns of an episode, siblings of a group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "turn", "sequence"]
Mean = Literal["none", "group", "leave_one_out", "batch"]
Std = Literal["none", "group", "batch", "batch_centred"]


def units_of(sequence: Tensor, turn: Tensor, level: Level) -> tuple[Tensor, int]:
    """[T] int64, which unit of the level each token belongs to, and how many there are. `turn` [T] counts within a sequence."""
    if level == "token":
        return torch.arange(len(sequence), device=sequence.device), len(sequence)
    if level == "turn":
        distinct, unit = torch.unique(torch.stack([sequence, turn]), dim=1, return_inverse=True)
        return unit, distinct.shape[1]
    return sequence, int(sequence[-1]) + 1


def segment_sum(values: Tensor, index: Tensor, num: int) -> Tensor:
    """[X] -> [num]: entry s is the sum of the values whose `index` [X] is s. An empty segment gives 0."""
    return torch.zeros(num, dtype=values.dtype, device=values.device).index_add(0, index, values)


def segment_mean(values: Tensor, index: Tensor, num: int, *, weight: Tensor | None = None) -> Tensor:
    """[X] -> [num], weighted where there is a `weight` [X]. A segment that is empty or has no weight gives 0.

    The mean of equal values is exactly that value.
    """
    weight = torch.ones_like(values) if weight is None else weight
    total = segment_sum(weight, index, num)
    # Rounding can make a plain mean of equal values differ from them: only what they differ by is averaged.
    least = torch.zeros_like(total).scatter_reduce(0, index, values.detach(), "amin", include_self=False)
    above = segment_sum(weight * (values - least[index]), index, num) / total.where(total > 0, 1)
    return torch.where(total > 0, least + above, 0)


def segment_std(values: Tensor, index: Tensor, num: int) -> Tensor:
    """[X] -> [num]: sample standard deviation (divisor n - 1). A segment of fewer than two gives 0."""
    count = segment_sum(torch.ones_like(values), index, num)
    deviation = values - segment_mean(values, index, num)[index]
    return (segment_sum(deviation.square(), index, num) / (count - 1).clamp(min=1)).sqrt()


def segment_position(index: Tensor, num: int) -> Tensor:
    """[X] int64 -> [X] int64: the place of each entry in its segment, from 0. `index` must not decrease."""
    count = torch.bincount(index, minlength=num)
    return torch.arange(len(index), device=index.device) - (count.cumsum(0) - count)[index]


def discounted_sum(values: Tensor, index: Tensor, num: int, *, discount: float) -> Tensor:
    """[X] -> [X]: each value and those that follow it in its segment, the n-th after it times discount^n.

    `index` must not decrease: the entries of a segment stand together, in order of time.
    """
    position = segment_position(index, num)
    steps = values.new_zeros(int(position.max()) + 1 if len(position) else 0, num)
    steps[position, index] = values
    for step in range(len(steps) - 2, -1, -1):
        steps[step] += discount * steps[step + 1]
    return steps[position, index]


def in_deviations(centred: Tensor, deviation: Tensor, *, epsilon: float) -> Tensor:
    """centred / (deviation + epsilon); exactly 0 where the deviation is 0.

    Where values do not differ none is better than another, and a division by epsilon would say the opposite. A deviation
    that is not a number gives none either, so that it is found out.
    """
    return torch.where(deviation == 0, 0, centred / (deviation + epsilon))


def normalise(values: Tensor, group: Tensor, *, mean: Mean, std: Std, epsilon: float) -> Tensor:
    """[X] -> [X]: (value - mean) / (std + epsilon), each over the values of its `group` [X], over all, or left out.

    Equal values give exact zeros, and so does a group of one where the group's mean or deviation is asked for.
    """
    wide = values.double()  # In single precision the squares of values beyond 1e19 overflow.
    centred = centre(wide, group, mean=mean)
    if std == "none":
        return centred.to(values.dtype)
    over = group if std == "group" else torch.zeros_like(group)
    spread = segment_std(centred if std == "batch_centred" else wide, over, _count(over))
    return in_deviations(centred, spread[over], epsilon=epsilon).to(values.dtype)


def centre(values: Tensor, group: Tensor, *, mean: Mean) -> Tensor:
    """[X] -> [X]: value - mean. leave_one_out: the mean of the others in its group, and 0 where there are none."""
    if mean == "none":
        return values
    over = torch.zeros_like(group) if mean == "batch" else group
    centred = values - segment_mean(values, over, _count(over))[over]
    if mean == "leave_one_out":
        count = segment_sum(torch.ones_like(values), over, _count(over))[over]
        centred = centred * count / (count - 1).clamp(min=1)  # x - (n * mean - x) / (n - 1)
    return centred


def _count(index: Tensor) -> int:
    return int(index.max()) + 1 if len(index) else 0
