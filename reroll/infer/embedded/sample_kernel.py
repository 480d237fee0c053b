"""Sampling as one Triton kernel: a program reads its row of logits, finds the normaliser, and walks to its token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def sample_plain_on_device(
    logits: Tensor, *, temperatures: Tensor, uniform: Tensor, may_end: Tensor, end_ids: Tensor
) -> Tensor:
    """See `sampler.sample_plain_on_device`."""
    num_rows, vocabulary = logits.shape
    drawn = torch.empty((2, num_rows), dtype=torch.float64, device=logits.device)
    _sample[(num_rows,)](
        drawn,
        logits,
        temperatures,
        uniform,
        may_end,
        end_ids,
        num_rows,
        vocabulary,
        logits.stride(0),
        NUM_ENDS=len(end_ids),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return drawn


@triton.jit
def _scores(row_logits, start, vocabulary, cool, end_ids, may_end, NUM_ENDS: tl.constexpr, BLOCK: tl.constexpr):
    """A block's scores, and the same with what must not be drawn at the lowest."""
    LOWEST: tl.constexpr = -1.0e30
    columns = start + tl.arange(0, BLOCK)
    scores = tl.load(row_logits + columns, mask=columns < vocabulary, other=0.0).to(tl.float32) * cool
    scores = tl.where(columns < vocabulary, scores, LOWEST)
    allowed = scores
    for number in tl.static_range(NUM_ENDS):
        drawable = tl.where(may_end == 0, LOWEST, allowed)
        allowed = tl.where(columns == tl.load(end_ids + number), drawable, allowed)
    return scores, allowed


# One kernel for every number of rows, and wherever in their buffer the fractions begin.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperatures", "uniforms", "may_ends"])
def _sample(
    drawn,
    logits,
    temperatures,
    uniforms,
    may_ends,
    end_ids,
    num_rows,
    vocabulary,
    row_stride,
    NUM_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOWEST: tl.constexpr = -1.0e30
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    temperature = tl.load(temperatures + row).to(tl.float32)
    may_end = tl.load(may_ends + row)
    is_greedy = temperature <= 0
    cool = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))

    # The normaliser, over the whole vocabulary; and the likeliest token that may be drawn.
    highest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], LOWEST, tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        scores, allowed = _scores(row_logits, start, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
        higher = tl.maximum(highest, tl.max(scores, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(scores - higher), 0)
        highest = higher
        top = tl.max(allowed, 0)
        token = tl.where(top > best, start + tl.argmax(allowed, 0), token)
        best = tl.maximum(best, top)

    if not is_greedy:
        # What may be drawn, summed exactly as it is walked afterwards.
        mass = tl.full([], 0.0, tl.float64)
        for start in range(0, vocabulary, BLOCK):
            scores, allowed = _scores(row_logits, start, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
            mass += tl.sum(tl.exp(allowed - highest), 0).to(tl.float64)
        point = tl.load(uniforms + row).to(tl.float64) * mass
        passed = tl.full([], 0.0, tl.float64)
        before = tl.full([], 0.0, tl.float64)
        begin = tl.full([], 0, tl.int32)
        start = tl.full([], 0, tl.int32)
        while (start < vocabulary) & (passed <= point):
            scores, allowed = _scores(row_logits, start, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
            here = tl.sum(tl.exp(allowed - highest), 0).to(tl.float64)
            # A block without weight is never the last: rounding at the end must not lead into one.
            begin = tl.where(here > 0, start, begin)
            before = tl.where(here > 0, passed, before)
            passed += here
            start += BLOCK
        scores, allowed = _scores(row_logits, begin, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
        weights = tl.exp(allowed - highest).to(tl.float64)
        offset = tl.sum((before + tl.cumsum(weights, 0) <= point).to(tl.int32), 0)
        last = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), 0)
        token = begin + tl.minimum(offset, last)

    score = tl.load(row_logits + token).to(tl.float32) * cool
    tl.store(drawn + row, token.to(tl.float64))
    tl.store(drawn + num_rows + row, (score - highest - tl.log(total)).to(tl.float64))
