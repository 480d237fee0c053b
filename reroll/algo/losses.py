"""Policy losses, one value per token. Masking and reduction are `aggregate`'s job.

A = advantage, r = ratio = policy / old policy, sg = held fixed (no gradient). A formula for a whole sequence is spread
over its tokens such that, while the policy has not moved (r = 1), every loss has the gradient of REINFORCE: -A per
token (of a loss with one ratio a sequence: its mean A). Every aggregation then weighs it as any other loss.
"""

from __future__ import annotations

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
    loss = clipped_surrogate(t.ratio, t.advantage, clip_low, clip_high)
    if dual_clip is None:
        return loss
    return torch.where(t.advantage < 0, torch.minimum(loss, -dual_clip * t.advantage), loss)


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


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). [T] -> [T]"""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


Mode = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    *,
    mode: Mode,
    num_loss_tokens: int,
    num_sequences: int,
    length: int | None = None,
) -> Tensor:
    """[T] -> scalar, over the tokens where `mask` is true.

    token_mean: the mean over tokens. sequence_mean, sequence_sum: the mean over sequences of their token means, or sums.
    fixed_length: sequence_sum / `length`, the longest answer there can be (Dr. GRPO, arXiv 2503.20783).

    The counts are those of the whole batch that one optimizer step sees, so the results of its micro-batches add up to
    the result of the batch. A sequence must not be cut between micro-batches. An empty mask gives 0; a sequence without
    a token in the loss counts nowhere.
    """
    kept = torch.where(mask, per_token, 0.0)
    if mode == "token_mean":
        return kept.sum() / max(num_loss_tokens, 1)
    if mode == "sequence_mean":
        tokens_in_sequence = torch.bincount(sequence_index, weights=mask.to(kept.dtype)).clamp(min=1)
        kept = kept / tokens_in_sequence.to(kept.dtype)[sequence_index]
    elif mode == "fixed_length":
        if length is None:
            raise ValueError("fixed_length divides by the longest answer there can be: pass length")
        kept = kept / length
    return kept.sum() / max(num_sequences, 1)
