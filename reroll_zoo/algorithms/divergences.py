"""Distances between a student's and a teacher's distribution at each token beyond the core's `reverse_kl`.

They keep to what `reroll.algo.divergence` promises, but for `adaptive_kl`, which may grow when outcomes are merged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reroll.algo.divergence import NEVER, kl, reverse_kl


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student): the student covers all that the teacher finds likely. Hinton et al., arXiv 1503.02531."""
    return kl(teacher, student)


def skewed_forward_kl(student: Tensor, teacher: Tensor, *, skew: float) -> Tensor:
    """KL(teacher || skew * teacher + (1 - skew) * student), 0 < skew < 1. At most -log(skew). DistiLLM, arXiv 2402.03898."""
    return kl(teacher, _mixture(teacher, student, share=skew))


def skewed_reverse_kl(student: Tensor, teacher: Tensor, *, skew: float) -> Tensor:
    """KL(student || skew * student + (1 - skew) * teacher), 0 < skew < 1. At most -log(skew). DistiLLM, arXiv 2402.03898."""
    return kl(student, _mixture(student, teacher, share=skew))


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
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def _mixture(p: Tensor, q: Tensor, *, share: float) -> Tensor:
    """log(share * p + (1 - share) * q)"""
    return torch.logaddexp(p.clamp(min=NEVER) + math.log(share), q.clamp(min=NEVER) + math.log1p(-share))
