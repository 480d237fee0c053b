"""Triton kernels for `policy.exact` on a GPU: products and sums of rows in which a row's bits depend on nothing but the row.

A product goes through its inputs in order, in steps of `STEP`, and adds up in fp32: no sum is cut in parts. How many rows and
columns a program takes changes how often a weight is read and nothing else, or so it should be. That is tried once for each
width: tiles that add up in another way than the first are not used. Of the others the quickest is, for each size of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from reroll.errors import ModelError

STEP = 64
"""Inputs that are multiplied at once: the tensor cores take them in order, so that twice as many may be loaded."""

_GROUP = 8
"""Tiles of rows that are worked on together, so that what they read is still near."""

_SUM_BLOCK = 1024
_SMALLEST = 64
"""Rows of the lowest tile: fewer are filled up by doing nothing."""

_TRIED_ROWS, _TRIED_COLUMNS = 512, 512
_MOST_ROWS = 8192
"""Products of more rows take the same tile."""

_TIMES = 5
_AHEAD_CYCLES = 2_000_000
"""A millisecond in which launches queue up, so that what is timed is the GPU."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product computes."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    step: int = STEP

    def count(self, num_rows: int, num_columns: int) -> int:
        """So many make a product."""
        return -(-num_rows // self.rows) * -(-num_columns // self.columns)


TILES = (
    Tile(64, 32, 4, 4),
    Tile(16, 64, 4, 4),
    Tile(32, 64, 4, 4),
    Tile(64, 64, 4, 4),
    Tile(64, 64, 4, 3, 2 * STEP),
    Tile(64, 128, 4, 4),
    Tile(64, 256, 4, 3),
    Tile(128, 128, 4, 3),
    Tile(128, 256, 8, 3),
    Tile(128, 256, 8, 4),
)
"""The first is what the others are compared with. Then from the smallest on."""

_MOST_FP32_NUMBERS = 64 * 64
"""Without tensor cores, larger tiles do not fit into registers."""

_chosen: dict[tuple[Any, ...], Tile] = {}

Way = TypeVar("Way")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]"""
    return multiply(x, weight, bias, tile=_tile(x, weight))


def _tile(x: Tensor, weight: Tensor) -> Tile:
    """The quickest for about so many rows, once it was tried. A graph that is being captured cannot wait for that."""
    num_rows = min(1 << max(len(x) - 1, 0).bit_length(), _MOST_ROWS)
    key = (x.device, x.dtype, num_rows, weight.shape, weight.stride())
    if (found := _chosen.get(key)) is not None:
        return found
    tiles = alike(x.shape[1], x.dtype, x.device)
    if not x.is_cuda or torch.cuda.is_current_stream_capturing() or not len(x):
        return fitting(tiles, len(x), len(weight), _num_processors(x.device))
    _chosen[key] = quickest({tile: partial(multiply, x, weight, None, tile=tile) for tile in worth_trying(tiles, num_rows)})
    return _chosen[key]


def worth_trying(tiles: tuple[Tile, ...], num_rows: int) -> tuple[Tile, ...]:
    """Those that are neither mostly empty nor far too small for so many rows."""
    return tuple(tile for tile in tiles if tile.rows <= max(num_rows, _SMALLEST) and 128 * tile.rows >= num_rows) or tiles[:1]


def quickest(ways: Mapping[Way, Callable[[], object]]) -> Way:
    """Which of these takes the GPU the least time."""
    return min(ways, key=lambda way: took_ms(ways[way]))


def took_ms(work: Callable[[], object]) -> float:
    """Of the GPU, one time in a row of them."""
    work()  # Compiled, if it was not.
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(_TIMES):
        work()
    ended.record()
    ended.synchronize()
    took: float = began.elapsed_time(ended) / _TIMES
    return took


def fitting(tiles: tuple[Tile, ...], num_rows: int, num_columns: int, num_processors: int) -> Tile:
    """The largest of these with which there is work for three quarters of the processors, else the smallest."""
    found = tiles[0]
    for tile in tiles:
        is_filled = tile.rows <= max(num_rows, _SMALLEST)
        if is_filled and 4 * tile.count(num_rows, num_columns) >= 3 * num_processors:
            found = tile
    return found


@cache
def alike(num_inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """The tiles that give the same bits on this device, for sums of this many terms."""
    from reroll_zoo.exact_sums import telling_product

    x, weight = (part.to(device) for part in telling_product(_TRIED_COLUMNS, num_inputs, dtype))
    x = x[:_TRIED_ROWS]
    want = multiply(x, weight, None, tile=TILES[0])
    is_free = torch.equal(multiply(x.flip(0), weight, None, tile=TILES[0]).flip(0), want)
    if not is_free or not torch.equal(multiply(x[:1], weight, None, tile=TILES[0]), want[:1]):
        raise ModelError(
            f"on this GPU the rows of a product of {num_inputs} inputs in {dtype} depend on each other, so trainer and engine "
            "cannot be equal to the bit: set policy.exact to false"
        )
    return TILES[0], *(tile for tile in TILES[1:] if _has_room(tile, dtype) and _gives(want, x, weight, tile))


def _has_room(tile: Tile, dtype: torch.dtype) -> bool:
    return dtype != torch.float32 or tile.rows * tile.columns * tile.step <= _MOST_FP32_NUMBERS * STEP


def _gives(want: Tensor, x: Tensor, weight: Tensor, tile: Tile) -> bool:
    try:
        return torch.equal(multiply(x, weight, None, tile=tile), want)
    except TritonError:  # It takes more shared memory than this GPU has.
        return False


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, tile: Tile) -> Tensor:
    """As `product`, in these tiles."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    output = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    _product[(tile.count(num_rows, num_outputs),)](
        output,
        x,
        weight,
        weight if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=tile.step,
        GROUP=_GROUP,
        HAS_BIAS=bias is not None,
        IS_EVEN=num_inputs % tile.step == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # Plain fp32 products stay fp32.
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


def sum_rows(x: Tensor, *, is_mean: bool) -> Tensor:
    """The sum of each row of x [T, C], or its mean: [T]. Adds up in fp32, rounds once."""
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    if len(x):
        divisor = x.shape[1] if is_mean else 1
        _sum_rows[(len(x),)](output, x.contiguous(), x.shape[1], float(divisor), BLOCK=_SUM_BLOCK)
    return output


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Another number of rows in every step: one kernel serves all.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    output,
    rows,
    weight,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    output_stride,
    input_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    high, wide = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, COLUMNS)
    group = program // (GROUP * wide)
    size = tl.minimum(high - group * GROUP, GROUP)
    inside = program % (GROUP * wide)
    row = (group * GROUP + inside % size) * ROWS + tl.arange(0, ROWS)
    column = inside // size * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, STEP)
    # What lies outside is computed from the first row and column, and dropped.
    source_row = tl.where(row < num_rows, row, 0).to(tl.int64)
    source_column = tl.where(column < num_outputs, column, 0).to(tl.int64)
    left = rows + source_row[:, None] * row_stride + place[None, :]
    right = weight + source_column[None, :] * output_stride + place[:, None] * input_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_inputs, STEP):
        if IS_EVEN:
            x = tl.load(left)
            w = tl.load(right)
        else:
            is_input = start + place < num_inputs
            x = tl.load(left, mask=is_input[None, :], other=0.0)
            w = tl.load(right, mask=is_input[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        left += STEP
        right += STEP * input_stride
    if HAS_BIAS:
        total += tl.load(bias + source_column).to(tl.float32)[None, :]
    target = output + row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    is_real = (row < num_rows)[:, None] & (column < num_outputs)[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=is_real)


@triton.jit
def _sum_rows(output, rows, num_columns, divisor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        is_real = start + columns < num_columns
        total += tl.load(rows + row * num_columns + start + columns, mask=is_real, other=0.0).to(tl.float32)
    tl.store(output + row, (tl.sum(total, 0) / divisor).to(output.dtype.element_ty))
