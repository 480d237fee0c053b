"""Policy losses, one value per token. Masking and reduction are `reduce.aggregate`'s job.

A = advantage, r = ratio = policy / old policy, sg = held fixed (no gradient). A formula for a whole sequence is spread
over its tokens such that, while the policy has not moved (r = 1), every loss has the gradient of REINFORCE: -A per
token (gspo and gmpo, which have one ratio a sequence: its mean A). Every aggregation then weighs it as any other loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reroll.algo.segments import segment_sum, units_of

LOG_RATIO_BOUND = 20.0
"""Log ratios are held within ± this, so that no ratio overflows. A token beyond has no gradient through its ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss sees of a packed micro-batch: whole sequences, [T] each. Off the mask every number is set to 0."""

    logp: Tensor
    """Log-prob under the policy, with gradient; finite."""
    old_logp: Tensor
    """Log-prob under the policy that the ratio is taken against: no gradient."""
    advantage: Tensor
    mask: Tensor
    """bool: the tokens in the loss."""
    sequence: Tensor
    """int64, not decreasing: which sequence a token belongs to."""
    selected: Tensor | None = None
    """bool: the tokens that a loss with a selection over the whole batch (clip_cov, kl_cov) treats apart."""
    sampler_logp: Tensor | None = None
    """Log-prob under the policy that drew the token, whatever the ratio is taken against: no gradient."""
    turn: Tensor | None = None
    """int64: which turn of its sequence wrote the token. Two sequences may have turns of the same number."""
    entropy: Tensor | None = None
    """Entropy of the policy's distribution at the token, with gradient. Only for a loss that asks for it, since
    it costs a second pass over the head: `loss: {kind: import, needs: [entropy], …}`."""

    def __post_init__(self) -> None:
        # Zeros rather than a later mask: the gradient of a masked product is still nan where a factor is.
        for name in ("logp", "old_logp", "advantage", "sampler_logp", "entropy"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, torch.where(self.mask, values, 0.0))

    @property
    def log_ratio(self) -> Tensor:
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @property
    def ratio(self) -> Tensor:
        """How much likelier the policy makes the token than the old one did."""
        return torch.exp(self.log_ratio)

    @property
    def length(self) -> Tensor:
        """On every token, how many tokens of its sequence are in the loss; at least 1."""
        return self.sequence_sum(torch.ones_like(self.logp)).clamp(min=1)

    def sequence_sum(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: on every token, the sum over the tokens of its sequence that are in the loss."""
        num = int(self.sequence[-1]) + 1
        return segment_sum(torch.where(self.mask, per_token, 0.0), self.sequence, num)[self.sequence]

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: on every token, the mean over the tokens of its sequence that are in the loss (none: 0)."""
        return self.sequence_sum(per_token) / self.length

    def turn_mean(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: on every token, the mean over the tokens of its turn that are in the loss (none: 0)."""
        if self.turn is None:
            raise ValueError("a ratio of turns needs Tokens.turn: say which turn wrote each token")
        turn, num = units_of(self.sequence, self.turn, "turn")
        total = segment_sum(torch.where(self.mask, per_token, 0.0), turn, num)
        return (total / segment_sum(self.mask.to(total.dtype), turn, num).clamp(min=1))[turn]


def reinforce(t: Tokens) -> Tensor:
    """-A * logp. No ratio; with advantage 1 this is the cross-entropy of SFT."""
    return -t.advantage * t.logp


def ppo(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Tensor:
    """-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), arXiv 1707.06347; two bounds as in DAPO, 2503.14476.

    A token whose ratio has already gone too far in the direction its advantage wants has no gradient. `dual_clip` c
    also bounds the loss by -c * A where A < 0 (1912.09729): a ratio beyond c then has no gradient either.
    """
    loss = _clipped_surrogate(t.ratio, t.advantage, clip_low, clip_high)
    if dual_clip is None:
        return loss
    return torch.where(t.advantage < 0, torch.minimum(loss, -dual_clip * t.advantage), loss)


def gspo(t: Tokens, *, clip_low: float, clip_high: float, level: Literal["sequence", "turn"] = "sequence") -> Tensor:
    """-min(s * A, clip(s) * A) with s = (product of the sequence's ratios)^(1 / length), arXiv 2507.18071.

    level turn: the product and the length are those of the token's turn.
    """
    return _clipped_surrogate(_geometric_ratio(t, level), t.advantage, clip_low, clip_high)


def gspo_token(t: Tokens, *, clip_low: float, clip_high: float, level: Literal["sequence", "turn"] = "sequence") -> Tensor:
    """GSPO with an advantage per token, arXiv 2507.18071: its s becomes sg[s] * policy / sg[policy].

    Value and gradient are GSPO's where a sequence has one advantage. Elsewhere each token is moved by its own.
    """
    ratio = _geometric_ratio(t, level).detach()
    return _clipped_surrogate(ratio * torch.exp(t.logp - t.logp.detach()), t.advantage, clip_low, clip_high)


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


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, or that of the value held within ± clip of the old one where it is larger. [T] -> [T].

    A value that already moved by more than `clip` towards the return has no gradient; clip inf is the plain squared error.
    """
    near_old = torch.clamp(value, old_value - clip, old_value + clip)
    return torch.maximum((value - returns).square(), (near_old - returns).square()) / 2


def clipped_mask(per_token: Tensor, t: Tokens) -> Tensor:
    """bool [T]: the tokens in the loss that have an advantage and yet no gradient, whatever bound of the loss did it.

    `per_token` is what a loss made of `t`, before anything is added to it; its graph is kept.
    """
    # A loss of one's own may be made of the entropy alone.
    gradient = torch.autograd.grad(per_token.sum(), t.logp, retain_graph=True, materialize_grads=True)[0]
    return (gradient == 0) & (t.advantage != 0)


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


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
        raise ValueError(
            "this loss needs Tokens.selected: run selection.SELECTIONS of its kind over the optimizer step's batch"
        )
    return t.selected


LOSSES: dict[str, Callable[..., Tensor]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "kimi": kimi,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""By config kind; called as `LOSSES[kind](tokens, **node.options)`. [T] -> [T]."""
