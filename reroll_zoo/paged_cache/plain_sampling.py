"""Sampling without waiting for the device: of rows that draw from the whole vocabulary, or take the likeliest token."""

from __future__ import annotations

import torch
from torch import Tensor

from reroll.infer.embedded.sampler import RowSampling, invert
from reroll.models import exact, fused


def is_plain(row: RowSampling, end_ids: tuple[int, ...]) -> bool:
    """Whether `sample_plain_on_device` takes this row: from the whole vocabulary or greedily, with or without `end_ids`."""
    return (not row.forbidden or row.forbidden == end_ids) and (not row.temperature or (row.top_p >= 1 and not row.top_k))


def sample_plain_on_device(
    logits: Tensor, *, temperatures: Tensor, uniform: Tensor, may_end: Tensor, end_ids: Tensor
) -> Tensor:
    """As the sampler's `sample` for plain rows, without waiting for the device: [2, R], tokens and log-probs, both in fp64.

    Where `may_end` is 0, the tokens `end_ids` are not drawn; it is 1 elsewhere.
    """
    scale = torch.where(temperatures > 0, temperatures, 1.0)
    if fused.runs_kernels(logits):
        from reroll_zoo.paged_cache import sample_kernel  # Imports triton, which CPU builds of PyTorch lack.

        drawn = sample_kernel.sample_plain_on_device(
            logits, temperatures=temperatures, uniform=uniform, may_end=may_end, end_ids=end_ids
        )
        if exact.is_exact():  # The drawn token's log-prob by the trainer's kernel.
            drawn[1] = fused.kernels().chosen_logprobs(logits, drawn[0].long(), temperature=scale)[0]
        return drawn
    probs = torch.softmax(logits.float() / scale[:, None].float(), -1)
    probs[:, end_ids] *= may_end[:, None].float()  # Nothing is lost: no such token is asked for its log-prob.
    tokens = torch.where(temperatures > 0, invert(probs, uniform), probs.argmax(-1))
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    return torch.stack((tokens.double(), logprobs.double()))
