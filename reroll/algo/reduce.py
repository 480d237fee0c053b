"""The one place where per-token values are masked and reduced."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
