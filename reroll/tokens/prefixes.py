"""Which tokens of packed sequences are worth computing once: those that follow the same prefix."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
    flat, bounds = ids.cpu().numpy(), cu_seqlens.tolist()
    rows = [flat[start:end] for start, end in pairwise(bounds)]
    index, first = np.empty(len(flat), dtype=np.int64), []
    previous, previous_index, num_distinct = flat[:0], index[:0], 0
    # In dictionary order, each row shares more with the row before it than with any other earlier one.
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    for row in order:
        start, end = bounds[row], bounds[row + 1]
        num_shared = _num_equal(previous, rows[row])
        num_new = end - start - num_shared
        index[start : start + num_shared] = previous_index[:num_shared]
        index[start + num_shared : end] = np.arange(num_distinct, num_distinct + num_new)
        first.append(np.arange(start + num_shared, end))
        previous, previous_index, num_distinct = rows[row], index[start:end], num_distinct + num_new
    return SharedPrefixes(
        first=torch.from_numpy(np.concatenate(first)),
        index=torch.from_numpy(index),
        sequences=torch.tensor(order),
        num_added=torch.tensor([len(added) for added in first]),
    )


def _num_equal(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
