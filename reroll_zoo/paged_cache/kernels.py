"""Triton kernels for a paged cache: put new keys and values into pages, and attend to what the pages hold.

One attention kernel serves everything a step does: sequences that write one token, that continue a kept context, and that
are read from their beginning. A program takes the query heads that share a key, for a few neighbouring tokens of one
sequence, and walks the sequence's pages.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reroll.models.attention import Scoring

PAGE = 64
"""Tokens of a page."""

WRITING_ROWS, READING_ROWS = 16, 64
"""Rows of an attention program where every sequence has one token, and where some have many."""


def tokens_per_block(num_heads: int, num_kv_heads: int, *, rows: int) -> int:
    """How many neighbouring tokens a program of `attend` takes, if it has this many rows."""
    return _rows(num_heads // num_kv_heads, rows) // (num_heads // num_kv_heads)


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> None:
    """Write key and value [T, H_kv, D] to the places `rows` [T] of keys and values [pages, PAGE, H_kv, D]."""
    num_tokens, num_heads, dim = key.shape
    block_h, block_d = triton.next_power_of_2(num_heads), triton.next_power_of_2(dim)
    _store[(num_tokens,)](
        key,
        value,
        keys,
        values,
        rows,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    starts: Tensor,
    bounds: Tensor,
    block_sequence: Tensor,
    block_first: Tensor,
    rows: int,
    scoring: Scoring,
    num_warps: int | None = None,
    num_stages: int = 2,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """query [T, H, D] attends to the pages of keys and values [pages, PAGE, H_kv, D]; the result: as the query, or `dtype`.

    Sequence i has the tokens from `bounds[i]` to `bounds[i + 1]`, the first of them at place `starts[i]` of the sequence;
    its pages are `tables[i]`. Block b is the work of one program: the tokens of sequence `block_sequence[b]` from its
    token `block_first[b]` on, as many as `tokens_per_block`; a sequence below 0 is no work.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    output = torch.empty((num_tokens, num_heads, dim), dtype=dtype or query.dtype, device=query.device)
    block_m = _rows(group, rows)
    options: dict[str, Any] = {"num_warps": num_warps or (4 if block_m > 16 or dim > 64 else 2), "num_stages": num_stages}
    _attend[(len(block_sequence), num_kv_heads)](
        output,
        query,
        keys,
        values,
        tables,
        starts,
        bounds,
        block_sequence,
        block_first,
        scoring.scaling,
        scoring.softcap or 1.0,
        scoring.sliding_window or 0,
        query if scoring.sinks is None else scoring.sinks,
        query.stride(0),
        query.stride(1),
        tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_M=block_m,
        PAGE_SIZE=PAGE,
        HAS_CAP=scoring.softcap is not None,
        HAS_WINDOW=scoring.sliding_window is not None,
        HAS_SINKS=scoring.sinks is not None,
        # Plain fp32 products stay fp32: the log-probs must be the trainer's.
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
        **options,
    )
    return output


def _rows(group: int, rows: int) -> int:
    return int(max(rows, triton.next_power_of_2(group)))


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _store(
    key,
    value,
    keys,
    values,
    rows,
    key_token,
    key_head,
    value_token,
    value_head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    is_real = (heads < NUM_HEADS) & (dims < DIM)
    target = (row * NUM_HEADS + heads) * DIM + dims
    new_key = tl.load(key + token * key_token + heads * key_head + dims, mask=is_real)
    tl.store(keys + target, new_key.to(keys.dtype.element_ty), mask=is_real)
    new_value = tl.load(value + token * value_token + heads * value_head + dims, mask=is_real)
    tl.store(values + target, new_value.to(values.dtype.element_ty), mask=is_real)


# The whole numbers of a step lie in one buffer, so where each begins depends on the step's size: one kernel serves all.
@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["tables", "starts", "bounds", "block_sequence", "block_first"],
)
def _attend(
    output,
    query,
    keys,
    values,
    tables,
    starts,
    bounds,
    block_sequence,
    block_first,
    scaling,
    softcap,
    window,
    sinks,
    query_token,
    query_head,
    table_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    LOWEST: tl.constexpr = -1.0e30
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    sequence = tl.load(block_sequence + tl.program_id(0)).to(tl.int64)
    if sequence < 0:
        return
    kv_head = tl.program_id(1)
    first = tl.load(block_first + tl.program_id(0))
    begin = tl.load(bounds + sequence)
    count = tl.load(bounds + sequence + 1) - begin
    start = tl.load(starts + sequence)

    # A row is one query head of one token.
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < count)
    is_real = is_row[:, None] & (dims < DIM)[None, :]
    source = (begin + tokens).to(tl.int64)[:, None] * query_token + heads[:, None] * query_head + dims[None, :]
    queries = tl.load(query + source, mask=is_real, other=0.0)
    positions = start + tokens
    end = start + tl.minimum(count, first + TOKENS)

    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # As if a place had been seen already, with this score and a value of zero.
        highest = tl.load(sinks + heads).to(tl.float32)
        total += 1.0
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offsets = tl.arange(0, PAGE_SIZE)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(start + first - window + 1, 0) // PAGE_SIZE
    for page in range(low, tl.cdiv(end, PAGE_SIZE)):
        number = tl.load(tables + sequence * table_row + page).to(tl.int64)
        seen = page * PAGE_SIZE + offsets
        at = ((number * PAGE_SIZE + offsets) * NUM_KV_HEADS + kv_head) * DIM
        # What lies behind the end was never written: as zeros it cannot spoil a product.
        here_across = (seen < end)[None, :] & (dims < DIM)[:, None]
        keys_here = tl.load(keys + at[None, :] + dims[:, None], mask=here_across, other=0.0)
        scores = tl.dot(queries, keys_here, input_precision=PRECISION) * scaling
        if HAS_CAP:
            # tanh by exp: not every version of the language has it.
            bent = tl.exp(-2.0 * tl.abs(scores) / softcap)
            size = softcap * (1.0 - bent) / (1.0 + bent)
            scores = tl.where(scores < 0, -size, size)
        visible = seen[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible = visible & (seen[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, LOWEST)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - higher[:, None]), 0.0)
        fade = tl.exp(highest - higher)
        values_here = tl.load(
            values + at[:, None] + dims[None, :], mask=(seen < end)[:, None] & (dims < DIM)[None, :], other=0.0
        )
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values_here.dtype), values_here, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        highest = higher
    result = mixed / tl.maximum(total, 1e-30)[:, None]
    target = ((begin + tokens).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
    tl.store(output + target, result.to(output.dtype.element_ty), mask=is_real)
