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
_ADDED = 1024
_MAX_SPLITS = 8
_VARYING = ["num_rows", "num_column_blocks", "per_split", "size"]
"""Other numbers in every step, or layer: one kernel serves all."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut into programs."""

    rows: int
    """Rows of the input that a program works on at once."""
    columns: int
    """Columns of the result, all of one block."""
    splits: int
    """Programs that share the blocks of one sum; each writes a part, which are then added."""


def quantize_weight_into(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """What `arithmetic.quantized_weight` gives, written to where it is held. All are contiguous."""
    rows, width = weight.shape
    grid = (num_blocks(rows), num_blocks(width))
    _quantize[grid](codes, scales, weight, rows, width, LARGEST=LARGEST, TINY=TINY, BLOCK=BLOCK, ROWS=BLOCK, WHOLE=True)


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `arithmetic.quantized_rows`. The rows are contiguous."""
    num_rows, width = rows.shape
    codes = torch.empty(num_rows, width, dtype=CODES, device=rows.device)
    scales = torch.empty(num_rows, num_blocks(width), dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(num_rows, _QUANTIZED_ROWS), num_blocks(width))
    _quantize[grid](
        codes, scales, rows, num_rows, width, LARGEST=LARGEST, TINY=TINY, BLOCK=BLOCK, ROWS=_QUANTIZED_ROWS, WHOLE=False
    )
    return codes, scales


def product(
    rows: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    places: Tensor,
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
    has, and which of these is its first. `is_even`: K is a multiple of 128, and the number of columns of each layer one of 16.
    """
    (codes, scales), (weight_codes, weight_scales) = rows, weight
    num_rows, width = codes.shape
    tiling = tiling or tiling_of(num_rows, len(places), num_blocks(width), num_processors(codes.device))
    per_split = triton.cdiv(num_blocks(width), tiling.splits)
    size, is_split = num_rows * num_columns, tiling.splits > 1
    parts = torch.empty(tiling.splits * size, dtype=torch.float32 if is_split else dtype, device=codes.device)
    num_tiles = triton.cdiv(num_rows, tiling.rows) * len(places) * (BLOCK // tiling.columns)
    _multiply[(num_tiles, tiling.splits)](
        parts,
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
        EVEN=is_even,
        HAS_BIAS=bias is not None,
        num_warps=8 if tiling.rows * tiling.columns >= 128 * 128 else 4,
        num_stages=4,
    )
    if not is_split:
        return parts
    added = torch.empty(size, dtype=dtype, device=codes.device)
    _add[(triton.cdiv(size, _ADDED),)](added, parts, size, SPLITS=tiling.splits, SIZE=_ADDED)
    return added


def tiling_of(num_rows: int, num_column_blocks: int, num_inner_blocks: int, processors: int) -> Tiling:
    """A tiling that gives every processor of the GPU something to do. Few rows read little but the weight, which is then dealt
    out over more programs: by halves of its blocks, and by parts of the sums, as long as writing these costs less than it."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    num_tiles = triton.cdiv(num_rows, rows) * num_column_blocks
    columns = BLOCK if num_tiles >= processors else BLOCK // 2
    num_tiles *= BLOCK // columns
    worth_it = num_inner_blocks * BLOCK // (8 * num_rows)
    wanted = min(2 * processors // num_tiles, worth_it, num_inner_blocks // 2, _MAX_SPLITS)
    splits = max(1, wanted)
    per_split = -(-num_inner_blocks // splits)
    return Tiling(rows, columns, -(-num_inner_blocks // per_split))


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
    scale = tl.where(largest > TINY, tl.div_rn(largest, LARGEST + tl.zeros((ROWS,), tl.float32)), 1.0)
    if WHOLE:
        tl.store(scales + tile * num_blocks + block, tl.max(scale, axis=0))
    else:
        tl.store(scales + rows * num_blocks + block, scale, mask=rows < num_rows)
    scaled = tl.div_rn(numbers, scale[:, None] + tl.zeros((ROWS, BLOCK), tl.float32))
    tl.store(codes + places, scaled.to(codes.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=_VARYING)
def _multiply(
    parts,
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
    if HAS_BIAS:  # The first part of a sum has it.
        total += tl.load(bias + before + own, mask=(own < size) & (split == 0), other=0.0).to(tl.float32)[:, None]
    start = (split.to(tl.int64) * num_columns + before) * num_rows
    targets = parts + start + rows.to(tl.int64)[None, :] * size + own[:, None]
    tl.store(targets, total.to(parts.dtype.element_ty), mask=has_row[None, :] & (own[:, None] < size))


@triton.jit(do_not_specialize=_VARYING)
def _add(added, parts, size, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The parts of all sums, in order."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + places, mask=places < size, other=0.0)
    tl.store(added + places, total.to(added.dtype.element_ty), mask=places < size)
