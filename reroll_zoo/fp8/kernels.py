"""Triton kernels for 8-bit linear layers: codes and scales of inputs and weights, and their product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from reroll_zoo.fp8.arithmetic import BLOCK, CODES, LARGEST, TINY, num_blocks

_QUANTIZED_ROWS = 8
"""Rows of an input that a program quantizes."""
_GROUP = 8
"""Tiles of rows that take their turns at a weight while the cache of the GPU holds it."""
_MAX_SPLITS = 8
_VARYING = ["num_rows", "num_column_blocks", "per_split"]
"""Other numbers in every step, or layer: one kernel serves all."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut into programs."""

    rows: int
    """Rows of the input that a program works on at once."""
    columns: int
    """Columns of the result, all of one block."""
    splits: int
    """Programs that share the blocks of one sum, a power of two. Each writes a part; whichever is last adds them, in order."""


def quantize_weight_into(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """What `arithmetic.quantized_weight` gives, written to where it is held. All are contiguous."""
    rows, width = weight.shape
    grid = (num_blocks(rows), num_blocks(width))
    _quantize[grid](
        codes, scales, weight, rows, width, LARGEST=LARGEST, TINY=TINY, BLOCK=BLOCK, ROWS=BLOCK, WHOLE=True, num_warps=8
    )


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `arithmetic.quantized_rows`. The rows are contiguous."""
    num_rows, width = rows.shape
    codes, scales = _room_for(rows)
    grid = (triton.cdiv(num_rows, _QUANTIZED_ROWS), num_blocks(width))
    _quantize[grid](
        codes, scales, rows, num_rows, width, LARGEST=LARGEST, TINY=TINY, BLOCK=BLOCK, ROWS=_QUANTIZED_ROWS, WHOLE=False
    )
    return codes, scales


def quantized_norm(rows: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rows [T, K] over their root mean square, times weight, and `quantized_rows` of that. All are contiguous."""
    num_rows, width = rows.shape
    normed, (codes, scales) = torch.empty_like(rows), _room_for(rows)
    _norm[(num_rows,)](
        normed,
        codes,
        scales,
        rows,
        weight,
        epsilon,
        width,
        LARGEST=LARGEST,
        TINY=TINY,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks(width)),
        num_warps=8,
    )
    return normed, (codes, scales)


def quantized_gate(gate: Tensor, up: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """silu(gate) * up [T, K], and `quantized_rows` of that. All are contiguous."""
    num_rows, width = gate.shape
    gated, (codes, scales) = torch.empty_like(gate), _room_for(gate)
    grid = (triton.cdiv(num_rows, _QUANTIZED_ROWS), num_blocks(width))
    _gate[grid](gated, codes, scales, gate, up, num_rows, width, LARGEST=LARGEST, TINY=TINY, BLOCK=BLOCK, ROWS=_QUANTIZED_ROWS)
    return gated, (codes, scales)


def _room_for(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For the codes and the scales of rows."""
    num_rows, width = rows.shape
    codes = torch.empty(num_rows, width, dtype=CODES, device=rows.device)
    return codes, torch.empty(num_rows, num_blocks(width), dtype=torch.float32, device=rows.device)


def product(
    rows: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    places: Tensor,
    arrivals: Tensor,
    bias: Tensor | None,
    *,
    num_columns: int,
    dtype: torch.dtype,
    is_even: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Rows [T, K] times the weights of several layers, which lie over one another in whole blocks: the results [T, N] of each,
    flat, one after the other, `num_columns` numbers for each row in all.

    `places` [blocks of the weight, 3] says of each block how many columns the layers before its own have, how many its own
    has, and which of these is its first. `arrivals` [MAX_SPLIT_TILES], int32, are zeros, and are again when the product is
    done: no two products may share them at a time. `is_even`: K is a multiple of 128, and the number of columns of each layer
    one of 16.
    """
    (codes, scales), (weight_codes, weight_scales) = rows, weight
    num_rows, width = codes.shape
    tiling = tiling or tiling_of(num_rows, len(places), num_blocks(width), num_processors(codes.device))
    per_split = triton.cdiv(num_blocks(width), tiling.splits)
    size = num_rows * num_columns
    results = torch.empty(size, dtype=dtype, device=codes.device)
    parts = torch.empty(tiling.splits * size if tiling.splits > 1 else 0, dtype=torch.float32, device=codes.device)
    num_tiles = triton.cdiv(num_rows, tiling.rows) * len(places) * (BLOCK // tiling.columns)
    assert tiling.splits == 1 or num_tiles <= len(arrivals)
    _multiply[(num_tiles, tiling.splits)](
        results,
        parts,
        arrivals,
        codes,
        scales,
        weight_codes,
        weight_scales,
        places,
        weight_scales if bias is None else bias,
        num_rows,
        num_columns,
        len(places),
        width,
        per_split,
        BLOCK=BLOCK,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        GROUP=_GROUP,
        SPLITS=tiling.splits,
        EVEN=is_even,
        HAS_BIAS=bias is not None,
        num_warps=8 if tiling.rows * tiling.columns >= 128 * 128 else 4,
        num_stages=4,
    )
    return results


def tiling_of(num_rows: int, num_column_blocks: int, num_inner_blocks: int, processors: int) -> Tiling:
    """A tiling that gives every processor of the GPU something to do. Few rows read little but the weight, which is then dealt
    out over more programs: by halves of its blocks, and by parts of the sums, as long as writing these costs less than it."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    num_tiles = triton.cdiv(num_rows, rows) * num_column_blocks
    columns = BLOCK if num_tiles >= processors else BLOCK // 2
    num_tiles *= BLOCK // columns
    worth_it = num_inner_blocks * BLOCK // (8 * num_rows)
    most = min(2 * processors // num_tiles, worth_it, num_inner_blocks // 4, _MAX_SPLITS)
    return Tiling(rows, columns, 1 << most.bit_length() - 1 if most else 1)


@cache
def num_processors(device: torch.device) -> int:
    """Of this GPU. A CPU, where Triton's interpreter runs kernels, is taken for a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=_VARYING)
def _quantize(
    codes,
    scales,
    source,
    num_rows,
    width,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A block of each of some rows; with WHOLE, all of them under one scale."""
    tile, block = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    rows, columns = tile * ROWS + tl.arange(0, ROWS), block * BLOCK + tl.arange(0, BLOCK)
    places = rows[:, None].to(tl.int64) * width + columns[None, :]
    is_there = (rows[:, None] < num_rows) & (columns[None, :] < width)
    numbers = tl.load(source + places, mask=is_there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), axis=1)
    if WHOLE:
        largest = tl.max(largest, axis=0) + tl.zeros((ROWS,), tl.float32)
    scale = _scale_of(largest, LARGEST, TINY)
    if WHOLE:
        tl.store(scales + tile * num_blocks + block, tl.max(scale, axis=0))
    else:
        tl.store(scales + rows * num_blocks + block, scale, mask=rows < num_rows)
    tl.store(codes + places, _scaled(numbers, scale).to(codes.dtype.element_ty), mask=is_there)


@triton.jit
def _scale_of(largest, LARGEST: tl.constexpr, TINY: tl.constexpr):
    return tl.where(largest > TINY, tl.div_rn(largest, LARGEST + tl.zeros_like(largest)), 1.0)


@triton.jit
def _scaled(numbers, scale):
    return tl.div_rn(numbers, scale[:, None] + tl.zeros_like(numbers))


@triton.jit
def _norm(
    normed,
    codes,
    scales,
    states,
    weight,
    epsilon,
    width,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A row, whose blocks lie below one another. What is rounded to codes was rounded to the dtype of the row first."""
    row, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there, places = columns < width, row * width + columns
    x = tl.load(states + places, mask=is_there, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    result = (x * (1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / width + epsilon)) * w).to(normed.dtype.element_ty)
    tl.store(normed + places, result, mask=is_there)
    numbers = result.to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(numbers), axis=1), LARGEST, TINY)
    num_blocks = tl.cdiv(width, BLOCK)
    tl.store(scales + row * num_blocks + blocks, scale, mask=blocks < num_blocks)
    tl.store(codes + places, _scaled(numbers, scale).to(codes.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=_VARYING)
def _gate(
    gated,
    codes,
    scales,
    gate,
    up,
    num_rows,
    width,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of each of some rows."""
    block = tl.program_id(1)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), block * BLOCK + tl.arange(0, BLOCK)
    places = rows[:, None].to(tl.int64) * width + columns[None, :]
    is_there = (rows[:, None] < num_rows) & (columns[None, :] < width)
    g = tl.load(gate + places, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=is_there, other=0.0).to(tl.float32)
    result = (g * tl.sigmoid(g) * u).to(gated.dtype.element_ty)
    tl.store(gated + places, result, mask=is_there)
    numbers = result.to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(numbers), axis=1), LARGEST, TINY)
    tl.store(scales + rows * tl.num_programs(1) + block, scale, mask=rows < num_rows)
    tl.store(codes + places, _scaled(numbers, scale).to(codes.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=_VARYING)
def _multiply(
    results,
    parts,
    arrivals,
    codes,
    scales,
    weight,
    weight_scales,
    places,
    bias,
    num_rows,
    num_columns,
    num_column_blocks,
    width,
    per_split,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of a product, turned: the weight's rows fill the tensor cores, however few rows the input has."""
    tile, split = tl.program_id(0), tl.program_id(1)
    num_row_tiles, num_column_tiles = tl.cdiv(num_rows, ROWS), num_column_blocks * (BLOCK // COLUMNS)
    # Tiles of the same columns come one after the other, so that the weight is fetched once for some of them.
    group = tile // (GROUP * num_column_tiles)
    first_row_tile = group * GROUP
    height = min(num_row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + (tile % (GROUP * num_column_tiles)) % height
    column_tile = (tile % (GROUP * num_column_tiles)) // height

    rows, columns = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, BLOCK)
    column_block, num_blocks = column_tile * COLUMNS // BLOCK, tl.cdiv(width, BLOCK)
    row_codes = codes + rows.to(tl.int64)[None, :] * width
    weight_codes = weight + columns.to(tl.int64)[:, None] * width
    has_row = rows < num_rows
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for block in range(split * per_split, min(num_blocks, (split + 1) * per_split)):
        numbers = block * BLOCK + inner
        if EVEN:
            ours = tl.load(weight_codes + numbers[None, :])
            theirs = tl.load(row_codes + numbers[:, None], mask=has_row[None, :], other=0.0)
        else:
            ours = tl.load(weight_codes + numbers[None, :], mask=numbers[None, :] < width, other=0.0)
            theirs = tl.load(row_codes + numbers[:, None], mask=has_row[None, :] & (numbers[:, None] < width), other=0.0)
        our_scale = tl.load(weight_scales + column_block * num_blocks + block)
        their_scales = tl.load(scales + rows * num_blocks + block, mask=has_row, other=0.0)
        total += tl.dot(ours, theirs) * (their_scales * our_scale)[None, :]

    before, size = tl.load(places + column_block * 3), tl.load(places + column_block * 3 + 1)
    first = tl.multiple_of(tl.load(places + column_block * 3 + 2), BLOCK)
    if EVEN:
        before, size = tl.multiple_of(before, 16), tl.multiple_of(size, 16)
    own = first + column_tile * COLUMNS % BLOCK + tl.arange(0, COLUMNS)
    their_place = before.to(tl.int64) * num_rows + rows.to(tl.int64)[None, :] * size + own[:, None]
    is_there = has_row[None, :] & (own[:, None] < size)
    our_bias = tl.zeros((COLUMNS,), tl.float32)
    if HAS_BIAS:
        our_bias += tl.load(bias + before + own, mask=own < size, other=0.0).to(tl.float32)
    if SPLITS == 1:
        tl.store(results + their_place, (total + our_bias[:, None]).to(results.dtype.element_ty), mask=is_there)
    else:
        stride = num_columns.to(tl.int64) * num_rows
        tl.store(parts + split * stride + their_place, total, mask=is_there)
        tl.debug_barrier()  # All of the part is written before its arrival is told.
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((COLUMNS, ROWS), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(parts + part * stride + their_place, mask=is_there, other=0.0, cache_modifier=".cg")
            tl.store(results + their_place, (total + our_bias[:, None]).to(results.dtype.element_ty), mask=is_there)
            tl.store(arrivals + tile, 0)
