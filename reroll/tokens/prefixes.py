"""Which tokens of packed sequences are worth computing once: those that follow the same prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOrder:
    """Units (sequences, or neighbours that stay together) in dictionary order: those that begin alike are neighbours.

    Each shares more with the unit before it than with any other earlier one. Units of several sequences are ordered, and
    compared, by their first.
    """

    order: list[int]
    num_shared: list[int]
    """With how many of the tokens of the one before it each of `order` begins. The first: 0."""
    num_tokens: list[int]
    """Tokens of each unit, by its number."""
    num_distinct: list[int]
    """Those that a model must see of it where nothing else is computed, by its number."""


def prefix_order(ids: Tensor, cu_seqlens: Tensor, *, unit_size: int = 1) -> PrefixOrder:
    """The order of packed sequences, of which `unit_size` neighbours each are a unit."""
    rows = _rows(ids, cu_seqlens)
    units = [rows[start : start + unit_size] for start in range(0, len(rows), unit_size)]
    order, num_shared = _sorted(rows[::unit_size])
    num_tokens = [sum(map(len, unit)) for unit in units]
    num_repeated = [0 if unit_size == 1 else sum(_sorted(unit)[1]) for unit in units]
    return PrefixOrder(
        order=order,
        num_shared=num_shared,
        num_tokens=num_tokens,
        num_distinct=[total - repeated for total, repeated in zip(num_tokens, num_repeated, strict=True)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """A token's state depends on the tokens before it only, so sequences that begin alike need their beginning once."""

    first: Tensor
    """[U] where in the pack each distinct token stands first."""
    index: Tensor
    """[T] which of the distinct tokens each token of the pack is: `values_U[index]` spreads results over the pack."""
    sequences: Tensor
    """[N] in whose order the distinct tokens stand: first those of one sequence, then those that the next adds to it, …"""
    num_added: Tensor
    """[N] how many distinct tokens each of `sequences` adds: its last ones."""


def shared_prefixes(ids: Tensor, cu_seqlens: Tensor) -> SharedPrefixes:
    """Find the longest common beginnings among packed sequences: prompts of siblings, and whatever else they share."""
    bounds = cu_seqlens.tolist()
    index, first = np.empty(len(ids), dtype=np.int64), []
    previous, num_distinct = index[:0], 0
    order, num_shared = _sorted(_rows(ids, cu_seqlens))
    for row, shared in zip(order, num_shared, strict=True):
        start, end = bounds[row], bounds[row + 1]
        added = end - start - shared
        index[start : start + shared] = previous[:shared]
        index[start + shared : end] = np.arange(num_distinct, num_distinct + added)
        first.append(np.arange(start + shared, end))
        previous, num_distinct = index[start:end], num_distinct + added
    return SharedPrefixes(
        first=torch.from_numpy(np.concatenate(first)),
        index=torch.from_numpy(index),
        sequences=torch.tensor(order),
        num_added=torch.tensor([len(added) for added in first]),
    )


def _rows(ids: Tensor, cu_seqlens: Tensor) -> list[Row]:
    flat = ids.cpu().numpy()
    return [flat[start:end] for start, end in pairwise(cu_seqlens.tolist())]


def _sorted(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The rows in dictionary order, and with how many tokens of the row before it each begins."""
    keys = [row.astype(">u8").tobytes() for row in rows]  # Of which bytes are compared as the numbers are.
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0, *(_num_equal(rows[before], rows[after]) for before, after in pairwise(order))]


def _num_equal(left: Row, right: Row) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
