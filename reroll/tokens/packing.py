"""Cuts of a batch: into optimizer steps, ranks and micro-batches. Units stay whole and no cut loses or repeats one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from reroll.tokens.batch import Batch


def micro_batches(batch: Batch, *, max_tokens: int) -> list[Batch]:
    """Parts of at most `max_tokens` tokens that together are the batch; global denominators kept.

    A sequence longer than that gets a part of its own.
    """
    return [batch.select_units(part) for part in fill(batch.unit_lengths, max_tokens=max_tokens)]


def mini_batches(batch: Batch, num: int, *, seed: int) -> list[Batch]:
    """The batch in random order, in `num` parts of equal unit counts (within one), each with its own denominators.

    One part is one optimizer step. A batch of fewer units gives as many parts as it has.
    """
    num_units = len(batch) // batch.unit_size
    order = torch.randperm(num_units, generator=torch.Generator().manual_seed(seed))
    return [batch.select_units(sorted(part.tolist())).recount() for part in torch.tensor_split(order, min(num, num_units))]


def fill(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Which sequences share a micro-batch: first-fit decreasing, so neighbours in a part are of like length."""
    parts: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            parts.append([])
            room.append(max_tokens)
            place = len(parts) - 1
        parts[place].append(index)
        room[place] -= lengths[index]
    return parts


def balance(lengths: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Which sequences go to which rank: the longest left goes to the rank with the fewest tokens."""
    if num_parts > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences cannot be spread over {num_parts} ranks: use a larger batch or fewer devices"
        )
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, rank) for rank in range(num_parts)]
    for index in _longest_first(lengths):
        tokens, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (tokens + lengths[index], rank))
    return [sorted(part) for part in parts]


def join(batch: Batch, parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> Tensor:
    """Per-token results [T, …] of `batch.select(part)` for each part, put back into the batch's order."""
    bounds = batch.cu_seqlens.tolist()
    joined = values[0].new_empty(batch.num_tokens, *values[0].shape[1:])
    for part, value in zip(parts, values, strict=True):
        rows = torch.cat([torch.arange(bounds[index], bounds[index + 1]) for index in part])
        joined[rows.to(value.device)] = value
    return joined


def join_sequences(parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> Tensor:
    """As `join`, for results [N] with one entry per sequence."""
    order = torch.tensor([index for part in parts for index in part])
    flat = torch.cat(list(values))
    return torch.empty_like(flat).index_copy(0, order, flat)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
