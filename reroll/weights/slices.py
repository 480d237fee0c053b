"""Who sends which part of which weight to whom: planned once from what each rank holds, and replayed at every push.

Arithmetic alone, without tensors or processes: a run asks with what its ranks say, the planner with what ranks would hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reroll.errors import ModelError

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
"""Of one value, by the name that torch has for its dtype."""


class Box(NamedTuple):
    """A part of a tensor: from where, and how far, along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def cut(self, dim: int, *, num: int, index: int) -> Box:
        """One of `num` parts along a dimension, as `torch.chunk` cuts: the last ones may be smaller, or empty."""
        length = self.shape[dim]
        step = -(-length // num)
        begin, end = min(index * step, length), min((index + 1) * step, length)
        start = (*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :])
        return Box(start, (*self.shape[:dim], end - begin, *self.shape[dim + 1 :]))


def whole_box(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


class Slice(NamedTuple):
    """A rank's part of a weight."""

    name: str
    box: Box
    shape: tuple[int, ...]
    """Of the whole weight."""
    dtype: str
    """In which it travels, by torch's name."""

    @property
    def num_bytes(self) -> int:
        return self.box.size * VALUE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The buckets of a push, in order: what each sender puts into each. A bucket has whole weights, in pieces."""

    buckets: tuple[Mapping[int, tuple[Slice, ...]], ...]

    @property
    def senders(self) -> tuple[int, ...]:
        """Ranks that send anything; of a push without weights, the first."""
        return tuple(sorted({rank for bucket in self.buckets for rank in bucket})) or (0,)

    def of(self, rank: int) -> tuple[tuple[Slice, ...], ...]:
        """What this rank puts into each bucket."""
        return tuple(bucket.get(rank, ()) for bucket in self.buckets)

    def bytes_of(self, rank: int) -> int:
        """What this rank sends in a push."""
        return sum(part.num_bytes for bucket in self.buckets for part in bucket.get(rank, ()))


def plan_slices(held: Sequence[Mapping[str, Slice]], *, bucket_bytes: int) -> SlicePlan:
    """Every element of every weight once, from a rank that holds it: of several that do, from the one with least in the
    bucket, and then with least in all.

    `held`: what each rank has of each weight, by name. Buckets take whole weights up to `bucket_bytes`; a larger weight has
    one of its own. Raises ModelError if some part of a weight is held by nobody.
    """
    buckets: list[list[str]] = [[]]
    num_filled = 0
    for name, first in held[0].items():
        num_bytes = math.prod(first.shape) * VALUE_BYTES[first.dtype]
        if num_filled and num_filled + num_bytes > bucket_bytes:
            buckets.append([])
            num_filled = 0
        num_filled += num_bytes
        buckets[-1].append(name)
    loads = [0] * len(held)
    return SlicePlan(tuple(_shared_out(names, held, loads) for names in buckets))


def _shared_out(names: Sequence[str], held: Sequence[Mapping[str, Slice]], loads: list[int]) -> dict[int, tuple[Slice, ...]]:
    """Who sends what of a bucket: the largest parts are given out first. `loads`: what each rank sends in all."""
    pieces: dict[int, tuple[Slice, ...]] = {}
    here = [0] * len(held)
    holders = {part: ranks for name in names for part, ranks in _holders(name, held).items()}
    for part in sorted(holders, key=lambda part: -part.num_bytes):
        ranks = holders[part]
        sender = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda rank: (here[rank], loads[rank]))
        here[sender] += part.num_bytes
        loads[sender] += part.num_bytes
        pieces[sender] = (*pieces.get(sender, ()), part)
    return pieces


def _holders(name: str, held: Sequence[Mapping[str, Slice]]) -> dict[Slice, list[int]]:
    """The different parts of a weight, and which ranks hold each."""
    holders: dict[Slice, list[int]] = {}
    for rank, parts in enumerate(held):
        if parts[name].box.size:
            holders.setdefault(parts[name], []).append(rank)
    shape = held[0][name].shape
    if sum(part.box.size for part in holders) != math.prod(shape):
        raise ModelError(f"the ranks' parts of {name} do not add up to its shape {shape}: it cannot be sent in slices")
    return holders
