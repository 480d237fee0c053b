"""Distances between a student's and a teacher's distribution at each token: pure functions of log-probs.

All take log-probs of the same outcomes, [C, K] each, and give [C]. They are zero where the two agree, and only there.
A log-prob of -inf (an outcome that cannot happen) is taken as a very small one, so results and gradients are finite.

A teacher may name only its k likeliest tokens (`coarse`): both distributions are then looked at over those k and one more
outcome, "any other token". A KL cannot grow when outcomes are merged: it is exact for that coarser view, never above the
distance over all tokens, and equal to it where all are named.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEVER = -1e4
"""Log-prob that stands for -inf: its exponential is 0, its products with 0 are 0."""


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q)."""
    p, q = p.clamp(min=NEVER), q.clamp(min=NEVER)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher): the student keeps to what the teacher finds likely. MiniLLM, arXiv 2306.08543."""
    return kl(student, teacher)


def coarse(logp: Tensor, ids: Tensor | None) -> Tensor:
    """Log-probs [C, V] -> [C, k + 1]: of the tokens `ids` [C, k], and behind them of all other tokens together.

    Without ids every token is an outcome of its own: [C, V] as it is.
    """
    if ids is None:
        return logp
    # Summed up, not taken as one minus the named: that difference is rounding where the named are nearly everything.
    others = logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, ids), others], -1)
