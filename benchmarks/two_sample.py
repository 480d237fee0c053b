"""Whether two samples come from one distribution: permutation tests, which assume nothing about it, ties included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def p_value(ours: Sequence[float], others: Sequence[float], *, rng: np.random.Generator, num_draws: int = 5000) -> float:
    """How likely means this far apart are, if both come from one distribution."""
    first, second = np.array(ours, dtype=float), np.array(others, dtype=float)
    both, apart = np.concatenate((first, second)), abs(first.mean() - second.mean())
    found = 0
    for _ in range(num_draws):
        rng.shuffle(both)
        found += bool(abs(both[: len(first)].mean() - both[len(first) :].mean()) >= apart)
    return (found + 1) / (num_draws + 1)


def ks_p_value(ours: Sequence[float], others: Sequence[float], *, rng: np.random.Generator, num_draws: int = 5000) -> float:
    """How likely their shares below some value are this far apart (Kolmogorov and Smirnov), if both come from one distribution.

    It sees what means do not: other spreads, a tail that is cut while the rest makes up for it.
    """
    first, second = np.array(ours, dtype=float), np.array(others, dtype=float)
    values, counts = np.unique(np.concatenate((first, second)), return_counts=True)
    apart = _ks_distance(np.bincount(np.searchsorted(values, first), minlength=len(values)), counts)
    found = 0
    for _ in range(num_draws):
        drawn = rng.multivariate_hypergeometric(counts, len(first), method="marginals")
        found += bool(_ks_distance(drawn, counts) >= apart * (1 - 1e-12))
    return (found + 1) / (num_draws + 1)


def _ks_distance(first: NDArray[np.int64], both: NDArray[np.int64]) -> float:
    """Of the first sample's counts by value to those of the rest."""
    second = both - first
    return float(np.abs(first.cumsum() / first.sum() - second.cumsum() / second.sum()).max())
