"""Whether two samples come from one distribution: a permutation test, which assumes nothing about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def p_value(ours: Sequence[float], others: Sequence[float], *, rng: np.random.Generator, num_draws: int = 5000) -> float:
    """How likely means this far apart are, if both come from one distribution."""
    first, second = np.array(ours, dtype=float), np.array(others, dtype=float)
    both, apart = np.concatenate((first, second)), abs(first.mean() - second.mean())
    found = 0
    for _ in range(num_draws):
        rng.shuffle(both)
        found += bool(abs(both[: len(first)].mean() - both[len(first) :].mean()) >= apart)
    return (found + 1) / (num_draws + 1)
