"""Policy losses beyond the core's `reinforce` and `ppo`, one value per token. `reroll.algo.losses` says what all keep to."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from reroll.algo.losses import Tokens, clipped_surrogate, ppo


def gspo(t: Tokens, *, clip_low: float, clip_high: float, level: Literal["sequence", "turn"] = "sequence") -> Tensor:
    """-min(s * A, clip(s) * A) with s = (product of the sequence's ratios)^(1 / length), arXiv 2507.18071.

    level turn: the product and the length are those of the token's turn.
    """
    return clipped_surrogate(_geometric_ratio(t, level), t.advantage, clip_low, clip_high)


def gspo_token(t: Tokens, *, clip_low: float, clip_high: float, level: Literal["sequence", "turn"] = "sequence") -> Tensor:
    """GSPO with an advantage per token, arXiv 2507.18071: its s becomes sg[s] * policy / sg[policy].

    Value and gradient are GSPO's where a sequence has one advantage. Elsewhere each token is moved by its own.
    """
    ratio = _geometric_ratio(t, level).detach()
    return clipped_surrogate(ratio * torch.exp(t.logp - t.logp.detach()), t.advantage, clip_low, clip_high)


def gmpo(t: Tokens, *, clip_low: float, clip_high: float) -> Tensor:
    """-A * (geometric mean of the sequence's clipped ratios), arXiv 2507.20673.

    The bounds are on the log ratio: [e^-clip_low, e^clip_high]. As in PPO only a ratio that went too far in the
    direction its advantage wants is clipped; a clipped token has no gradient, its neighbours keep theirs.
    """
    bounded = t.log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(t.advantage > 0, torch.minimum(t.log_ratio, bounded), torch.maximum(t.log_ratio, bounded))
    return -t.advantage * torch.exp(t.sequence_mean(clipped))


def cispo(t: Tokens, *, clip_low: float, clip_high: float) -> Tensor:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * logp, arXiv 2506.13585. Clips the weight: no token is dropped."""
    return -t.ratio.clamp(1 - clip_low, 1 + clip_high).detach() * t.advantage * t.logp


def topr(t: Tokens) -> Tensor:
    """-w * A * logp, arXiv 2503.14286: w = 1 where A > 0, else sg[min(product of the sequence's ratios, 1)].

    What is good is imitated, however unlikely it has become; what is bad is pushed down only while it is still likely.
    """
    sequence_ratio = torch.exp(t.sequence_sum(t.log_ratio).clamp(max=0)).detach()
    return -torch.where(t.advantage > 0, 1.0, sequence_ratio) * t.advantage * t.logp


def sapo(t: Tokens, *, tau_positive: float, tau_negative: float) -> Tensor:
    """-(4 / tau) * sigmoid(tau * (r - 1)) * A, arXiv 2511.20347: a soft gate in place of the clip; tau by A's sign."""
    tau = torch.where(t.advantage > 0, torch.full_like(t.ratio, tau_positive), tau_negative)
    return -4 / tau * torch.sigmoid(tau * (t.ratio - 1)) * t.advantage


def kimi(t: Tokens, *, tau: float) -> Tensor:
    """(A - tau * S)² / (2 tau) a sequence, S its summed log ratio, arXiv 2501.12599; K2 (2507.20534) has the same square.

    Written out without its constant: -A * S + tau / 2 * S², the gradient that the paper prints (Eq. 3). The first term is
    summed token by token, so advantages may differ within a sequence.
    """
    total = t.sequence_sum(t.log_ratio)
    return -t.advantage * t.log_ratio + tau / 2 * total.square() / t.length


def dro(t: Tokens, *, beta: float) -> Tensor:
    """-A * logp + beta / 2 * (log r)² a token. arXiv 2405.19107 squares the sequence's log ratio: that form is `kimi`."""
    return -t.advantage * t.logp + beta / 2 * t.log_ratio.square()


def dppo_tv(
    t: Tokens, *, max_divergence: float, max_divergence_low: float | None = None, max_ratio: float = math.inf
) -> Tensor:
    """-r * A, and 0 for a token that is moving away beyond |p - p_old| = max_divergence, arXiv 2602.04879.

    |p - p_old| of the sampled token is the total variation between two outcomes, "this token" and "any other".
    `max_divergence_low` holds where A < 0, None: the same. The weight r is at most `max_ratio`: inside the region a
    rare token's ratio may be thousands, and its gradient all of the step's.
    """
    divergence = (t.logp.detach().exp() - t.old_logp.exp()).abs()
    return _inside(t, divergence, max_divergence, max_divergence_low, max_ratio)


def dppo_kl(
    t: Tokens, *, max_divergence: float, max_divergence_low: float | None = None, max_ratio: float = math.inf
) -> Tensor:
    """As `dppo_tv`, measured by KL(old || policy) between "this token" and "any other", arXiv 2602.04879."""
    other, old_other = _any_other(t.logp.detach()), _any_other(t.old_logp)
    kl = -t.old_logp.exp() * t.log_ratio.detach() + old_other * torch.log(old_other / other)
    return _inside(t, kl, max_divergence, max_divergence_low, max_ratio)


def clip_cov(t: Tokens, *, clip_low: float, clip_high: float) -> Tensor:
    """PPO, and 0 for the selected tokens, arXiv 2505.22617: a few that would cost the most entropy stand still."""
    return torch.where(_selected(t), 0.0, ppo(t, clip_low=clip_low, clip_high=clip_high))


def kl_cov(t: Tokens, *, coef: float) -> Tensor:
    """-r * A without a clip, and + coef * |log r| for the selected tokens, arXiv 2505.22617.

    The paper writes KL(old || policy); |log r| is the estimate that its authors' code trains with.
    """
    return -t.ratio * t.advantage + torch.where(_selected(t), coef * t.log_ratio.abs(), 0.0)


def _geometric_ratio(t: Tokens, level: Literal["sequence", "turn"]) -> Tensor:
    return torch.exp(t.turn_mean(t.log_ratio) if level == "turn" else t.sequence_mean(t.log_ratio))


def _inside(t: Tokens, divergence: Tensor, high: float, low: float | None, max_ratio: float) -> Tensor:
    """-min(r, max_ratio) * A, but 0 for tokens whose divergence is above the threshold and whose advantage drives them
    further off. The bound holds the weight of a token's gradient, and does not take its gradient away."""
    leaving = t.advantage * t.log_ratio > 0
    threshold = torch.where(t.advantage < 0, high if low is None else low, high)
    weight = t.ratio.detach().clamp(max=max_ratio) * torch.exp(t.logp - t.logp.detach())
    return torch.where(leaving & (divergence > threshold), 0.0, -weight * t.advantage)


def _any_other(logp: Tensor) -> Tensor:
    """The probability that the token was not sampled; never 0, so that its log is finite."""
    return -torch.expm1(logp).clamp(max=-1e-8)


def _selected(t: Tokens) -> Tensor:
    if t.selected is None:
        raise ValueError("this loss needs Tokens.selected: run what its node `selects` over the optimizer step's batch")
    return t.selected
