"""Sampling as two Triton kernels: each block of each row of logits is weighed, all at once; then a row finds the block that its
token lies in, and the token. A row's result depends on nothing but the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def sample_plain_on_device(
    logits: Tensor, *, temperatures: Tensor, uniform: Tensor, may_end: Tensor, end_ids: Tensor
) -> Tensor:
    """See `plain_sampling.sample_plain_on_device`."""
    num_rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, _BLOCK)
    weighed = torch.empty((num_rows, num_blocks, 4), dtype=torch.float32, device=logits.device)
    drawn = torch.empty((2, num_rows), dtype=torch.float64, device=logits.device)
    options = {"NUM_ENDS": len(end_ids), "BLOCK": _BLOCK, "num_warps": 8}
    given = logits, temperatures, may_end, end_ids, vocabulary, logits.stride(0)
    _weigh[(num_rows, num_blocks)](weighed, *given, **options)
    _sample[(num_rows,)](
        drawn, weighed, uniform, num_rows, num_blocks, *given, MAX_BLOCKS=triton.next_power_of_2(num_blocks), **options
    )
    return drawn


@triton.jit
def _cooling(temperature):
    """What scores are multiplied by; 1 where the likeliest token is taken."""
    return tl.where(temperature <= 0, 1.0, 1.0 / tl.where(temperature <= 0, 1.0, temperature))


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
@triton.jit(do_not_specialize_on_alignment=["temperatures", "may_ends"])
def _weigh(
    weighed,
    logits,
    temperatures,
    may_ends,
    end_ids,
    vocabulary,
    row_stride,
    NUM_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one block: the highest score, the sum of all weights and that of those which may be drawn, both relative to it, and
    the highest score that may be drawn."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cool = _cooling(tl.load(temperatures + row).to(tl.float32))
    may_end = tl.load(may_ends + row)
    scores, allowed = _scores(logits + row * row_stride, block * BLOCK, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
    highest = tl.max(scores, 0)
    target = weighed + (row * tl.num_programs(1) + block) * 4
    tl.store(target, highest)
    tl.store(target + 1, tl.sum(tl.exp(scores - highest), 0))
    tl.store(target + 2, tl.sum(tl.exp(allowed - highest), 0))
    tl.store(target + 3, tl.max(allowed, 0))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperatures", "uniforms", "may_ends"])
def _sample(
    drawn,
    weighed,
    uniforms,
    num_rows,
    num_blocks,
    logits,
    temperatures,
    may_ends,
    end_ids,
    vocabulary,
    row_stride,
    NUM_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    LOWEST: tl.constexpr = -1.0e30
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    cool, may_end = _cooling(temperature), tl.load(may_ends + row)

    blocks = tl.arange(0, MAX_BLOCKS)
    source, is_block = weighed + (row * num_blocks + blocks) * 4, blocks < num_blocks
    peaks = tl.load(source, mask=is_block, other=LOWEST)
    highest = tl.max(peaks, 0)
    shrunk = tl.exp(peaks - highest)
    total = tl.sum(tl.load(source + 1, mask=is_block, other=0.0) * shrunk, 0)
    tops = tl.load(source + 3, mask=is_block, other=LOWEST)

    # Where the sum of the weights passes the point. A block without weight is never the one: rounding at the end must not
    # lead into it.
    weights = (tl.load(source + 2, mask=is_block, other=0.0) * shrunk).to(tl.float64)
    point = tl.load(uniforms + row).to(tl.float64) * tl.sum(weights, 0)
    passed = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, blocks, 0), 0)
    block = tl.min(tl.where((weights > 0) & (passed > point), blocks, last), 0)
    before = tl.minimum(tl.max(tl.where(blocks < block, passed, 0.0), 0), point)
    if temperature <= 0:
        block = tl.argmax(tops, 0)

    row_logits = logits + row * row_stride
    _, allowed = _scores(row_logits, block * BLOCK, vocabulary, cool, end_ids, may_end, NUM_ENDS, BLOCK)
    if temperature <= 0:
        place = tl.argmax(allowed, 0)
    else:
        here = tl.exp(allowed - highest).to(tl.float64)
        offset = tl.sum((before + tl.cumsum(here, 0) <= point).to(tl.int32), 0)
        place = tl.minimum(offset, tl.max(tl.where(here > 0, tl.arange(0, BLOCK), 0), 0))

    token = block * BLOCK + place
    score = tl.load(row_logits + token).to(tl.float32) * cool
    tl.store(drawn + row, token.to(tl.float64))
    tl.store(drawn + num_rows + row, (score - highest - tl.log(total)).to(tl.float64))
