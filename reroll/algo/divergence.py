"""Distances between a student's and a teacher's distribution at each token: pure functions of log-probs.

All take log-probs of the same outcomes, [C, K] each, and give [C]. They are zero where the two agree, and only there.
A log-prob of -inf (an outcome that cannot happen) is taken as a very small one, so results and gradients are finite.

A teacher may name only its k likeliest tokens (`coarse`): both distributions are then looked at over those k and one more
outcome, "any other token". No distance but `adaptive_kl` can grow when outcomes are merged: it is exact for that coarser view,
never above the distance over all tokens, and equal to it where all are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_NEVER = -1e4
"""Log-prob that stands for -inf: its exponential is 0, its products with 0 are 0."""


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student): the student covers all that the teacher finds likely. Hinton et al., arXiv 1503.02531."""
    return _kl(teacher, student)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher): the student keeps to what the teacher finds likely. MiniLLM, arXiv 2306.08543."""
    return _kl(student, teacher)


def skewed_forward_kl(student: Tensor, teacher: Tensor, *, skew: float) -> Tensor:
    """KL(teacher || skew * teacher + (1 - skew) * student), 0 < skew < 1. At most -log(skew). DistiLLM, arXiv 2402.03898."""
    return _kl(teacher, _mixture(teacher, student, share=skew))


def skewed_reverse_kl(student: Tensor, teacher: Tensor, *, skew: float) -> Tensor:
    """KL(student || skew * student + (1 - skew) * teacher), 0 < skew < 1. At most -log(skew). DistiLLM, arXiv 2402.03898."""
    return _kl(student, _mixture(student, teacher, share=skew))


def adaptive_kl(student: Tensor, teacher: Tensor, *, head: float) -> Tensor:
    """Forward and reverse KL, weighed by where the two differ. AKL, arXiv 2404.02657.

    The teacher's head are its likeliest outcomes, as few as reach the probability `head` together; the rest is its tail.
    The forward KL weighs as much as the sum of |p(teacher) - p(student)| over the head has of the sum over all.
    """
    p, q = teacher.exp(), student.detach().exp()
    sorted_p, order = p.sort(-1, descending=True)
    gap = (sorted_p - q.gather(-1, order)).abs()
    in_head = sorted_p.cumsum(-1) - sorted_p < head  # Short of it before this outcome: it is needed.
    weight = (gap * in_head).sum(-1) / gap.sum(-1).clamp(min=torch.finfo(gap.dtype).tiny)
    return weight * forward_kl(student, teacher) + (1 - weight) * reverse_kl(student, teacher)


def js(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence, 0 < beta < 1. GKD, arXiv 2306.13649.

    beta * KL(teacher || m) + (1 - beta) * KL(student || m), where m = beta * teacher + (1 - beta) * student. Close to
    beta times the forward KL for a small beta, and to 1 - beta times the reverse KL for a large one.
    """
    middle = _mixture(teacher, student, share=beta)
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "skewed_forward_kl": skewed_forward_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
    "adaptive_kl": adaptive_kl,
    "js": js,
}
"""By config kind; called as `DIVERGENCES[kind](student, teacher, **options)`."""


def coarse(logp: Tensor, ids: Tensor | None) -> Tensor:
    """Log-probs [C, V] -> [C, k + 1]: of the tokens `ids` [C, k], and behind them of all other tokens together.

    Without ids every token is an outcome of its own: [C, V] as it is.
    """
    if ids is None:
        return logp
    # Summed up, not taken as one minus the named: that difference is rounding where the named are nearly everything.
    others = logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, ids), others], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.clamp(min=_NEVER), q.clamp(min=_NEVER)
    return (p.exp() * (p - q)).sum(-1)


def _mixture(p: Tensor, q: Tensor, *, share: float) -> Tensor:
    """log(share * p + (1 - share) * q)"""
    return torch.logaddexp(p.clamp(min=_NEVER) + math.log(share), q.clamp(min=_NEVER) + math.log1p(-share))
