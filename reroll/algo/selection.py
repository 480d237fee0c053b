"""Which tokens of a step are learned from."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def highest_entropy(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """bool [T]: the tokens of the mask whose entropy is in its highest `share`: at least its quantile 1 - share.

    Of tokens that tie at the quantile all are in (arXiv 2506.01939). At least one, if there is any.
    """
    values = entropy[mask].sort().values
    if not len(values):
        return torch.zeros_like(mask)
    # Rounded, for 0.8 * 5 is not 4. Between two neighbours, the upper one: none lies between them.
    place = math.ceil(round((1 - share) * (len(values) - 1), 9))
    return mask & (entropy >= values[place])
