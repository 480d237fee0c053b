"""Which tokens of a batch a loss treats apart, by statistics of the whole batch that one optimizer step sees.

Called as `(logp, advantage, mask, **node.selection)`, once per optimizer step, before the batch is cut, on the log-probs at the
start of the update: then neither micro-batches nor ranks change what is picked. The result is `Tokens.selected`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """(logp - mean) * (advantage - mean) of each token, means over the mask; 0 off the mask. [T] -> [T].

    What a token gives to the covariance that drives the policy's entropy down (arXiv 2505.22617).
    """
    num = mask.sum().clamp(min=1)
    logp, advantage = torch.where(mask, logp, 0.0), torch.where(mask, advantage, 0.0)
    return torch.where(mask, (logp - logp.sum() / num) * (advantage - advantage.sum() / num), 0.0)


def between(logp: Tensor, advantage: Tensor, mask: Tensor, *, share: float, low: float, high: float) -> Tensor:
    """bool [T]: `share` of the tokens, at least one, among those whose covariance lies in [low, high]; fewer if those run out.

    The paper draws them at random. Here they lie evenly spaced among the candidates in batch order, so a run repeats.
    """
    value = covariance(logp, advantage, mask)
    candidates = (mask & (value >= low) & (value <= high)).nonzero().squeeze(1)
    num = min(_num_picked(mask, share), len(candidates))
    places = (torch.arange(num, device=mask.device) * 2 + 1) * len(candidates) // max(2 * num, 1)
    return _true_at(candidates[places], mask)


def highest(logp: Tensor, advantage: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """bool [T]: the `share` of the tokens, at least one, with the highest covariance; of equals the first."""
    value = torch.where(mask, covariance(logp, advantage, mask), -torch.inf)
    return _true_at(torch.argsort(value, descending=True, stable=True)[: _num_picked(mask, share)], mask)


def _num_picked(mask: Tensor, share: float) -> int:
    """A small batch of few tokens would round down to none, and the loss to another one: at least one, if any."""
    num_tokens = int(mask.sum())
    return min(max(int(share * num_tokens), 1), num_tokens)


def _true_at(places: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(mask).index_fill(0, places, True)
