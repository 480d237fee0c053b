"""The one place where per-token values are masked and reduced."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["token_mean", "sequence_mean", "sequence_sum"]


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    *,
    mode: Mode,
    num_loss_tokens: int,
    num_sequences: int,
) -> Tensor:
    """[T] -> scalar, over the tokens where `mask` is true.

    The counts are those of the whole batch that one optimizer step sees, so the results of its micro-batches add up to
    the result of the batch. A sequence must not be cut between micro-batches. An empty mask gives 0.
    """
    kept = torch.where(mask, per_token, 0.0)
    if mode == "token_mean":
        return kept.sum() / max(num_loss_tokens, 1)
    if mode == "sequence_mean":
        tokens_in_sequence = torch.bincount(sequence_index, weights=mask.to(kept.dtype)).clamp(min=1)
        kept = kept / tokens_in_sequence.to(kept.dtype)[sequence_index]
    return kept.sum() / max(num_sequences, 1)
