"""Codes and scales in plain PyTorch, against numbers that are looked up one by one; and Triton's kernels against both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll_zoo.fp8 import arithmetic
from reroll_zoo.fp8.arithmetic import CODES, num_blocks


def numbers_of_e4m3() -> np.ndarray:
    """By code: one bit of sign, four of exponent, three of fraction; the last of either sign is no number."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 127 == 127, np.nan, np.where(code < 128, size, -size))


E4M3 = numbers_of_e4m3()


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """Of the codes whose numbers are nearest, the even one."""
    ordered = np.arange(127)  # Positive numbers, in order.
    above = np.clip(np.searchsorted(E4M3[:127], np.abs(values)), 1, 126)
    below, low, high = above - 1, E4M3[above - 1], E4M3[above]
    middle = (low + high) / 2
    size = np.abs(values.astype(np.float64))
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.where(up, ordered[above], ordered[below]) | np.where(np.signbit(values), 128, 0)


def looked_up(block: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block of fp32 numbers."""
    largest = np.abs(block).max()
    scale = np.float32(largest / np.float32(448)) if largest > 1e-30 else np.float32(1)
    return nearest_codes(block / scale), scale


def random(*shape: int) -> Tensor:
    """Numbers of very different size, with a block of zeros, one number alone, and some that no scale helps."""
    numbers = torch.randn(*shape) * torch.exp(3 * torch.randn(*shape))
    numbers[:, : min(128, shape[1])] *= 1e-3
    numbers[0] = 0
    numbers[-1] = 1e-38
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (3, 40), (130, 300), (256, 129)])
def test_codes_and_scales_are_those_looked_up_number_by_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*shape).to(dtype)
    numbers = weight.float().numpy()
    codes, scales = arithmetic.quantized_weight(weight)
    row_codes, row_scales = arithmetic.quantized_rows(weight)
    assert (codes.dtype, tuple(codes.shape), tuple(scales.shape)) == (CODES, shape, tuple(map(num_blocks, shape)))
    for column in range(0, shape[1], 128):
        for row in range(0, shape[0], 128):
            here = np.s_[row : row + 128, column : column + 128]
            expected, scale = looked_up(numbers[here])
            assert (codes.view(torch.uint8).numpy()[here] == expected).all()
            assert scales[row // 128, column // 128].item() == scale
        for row in range(shape[0]):
            expected, scale = looked_up(numbers[row, column : column + 128])
            assert (row_codes.view(torch.uint8).numpy()[row, column : column + 128] == expected).all()
            assert row_scales[row, column // 128].item() == scale


def test_what_is_quantized_is_off_by_a_sixteenth_at_most() -> None:
    weight = torch.randn(256, 384)
    codes, scales = arithmetic.quantized_weight(weight)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    off = (codes.float() * spread - weight).abs()
    assert (off <= weight.abs() / 16 + spread * 2.0**-10).all()
    assert off.max() > 0


def dequantized(codes: Tensor, scales: Tensor, *, row_block: int) -> Tensor:
    spread = scales.repeat_interleave(row_block, 0).repeat_interleave(128, 1)
    return codes.double() * spread[: codes.shape[0], : codes.shape[1]]


def expected_product(rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    return dequantized(*rows, row_block=1) @ dequantized(*weight, row_block=128).T


def test_the_product_is_that_of_the_numbers_that_codes_stand_for() -> None:
    rows, weight = arithmetic.quantized_rows(torch.randn(5, 300)), arithmetic.quantized_weight(torch.randn(200, 300))
    torch.testing.assert_close(arithmetic.product(rows, weight).double(), expected_product(rows, weight), atol=1e-4, rtol=1e-5)


def exact_numbers(rows: int, columns: int, *, block_rows: int) -> Tensor:
    """Numbers that e4m3 holds as they are: the interpreter, which rounds none, must give their codes."""
    steps = 2.0 ** torch.randint(-6, 6, (num_blocks(rows) if block_rows > 1 else rows, num_blocks(columns)))
    spread = steps.repeat_interleave(block_rows, 0).repeat_interleave(128, 1)[:rows, :columns]
    numbers = torch.from_numpy(E4M3[np.random.default_rng(0).integers(0, 126, (rows, columns))]).float()
    numbers[::block_rows, ::128] = 448.0
    return numbers * torch.where(torch.rand(rows, columns) < 0.5, -1, 1) * spread


@pytest.mark.parametrize("shape", [(256, 128), (130, 300)])
def test_the_kernels_codes_and_scales_are_those_of_the_arithmetic(shape: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.fp8 import kernels

    weight = exact_numbers(*shape, block_rows=128)
    codes = torch.zeros(*shape, dtype=torch.uint8).view(CODES)
    scales = torch.empty(*map(num_blocks, shape))
    kernels.quantize_weight_into(codes, scales, weight)
    expected = arithmetic.quantized_weight(weight)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])
    rows = exact_numbers(*shape, block_rows=1)
    (codes, scales), expected = kernels.quantized_rows(rows), arithmetic.quantized_rows(rows)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])


@pytest.mark.parametrize(
    ("sizes", "width", "num_rows", "tiling"),
    [
        ((256,), 384, 3, None),
        ((256,), 384, 3, (16, 128, 2)),
        ((200, 72, 128), 300, 37, (16, 64, 2)),
        ((200, 72), 1100, 5, (16, 64, 8)),
        ((200, 72, 128), 300, 37, None),
        ((64, 64), 128, 70, (32, 64, 1)),
        ((64, 64), 128, 130, (128, 128, 1)),
    ],
)
def test_the_kernels_product_is_that_of_the_numbers_that_codes_stand_for(
    sizes: tuple[int, ...], width: int, num_rows: int, tiling: tuple[int, int, int] | None
) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.fp8 import kernels

    check_product(kernels.product, sizes, width, num_rows, None if tiling is None else kernels.Tiling(*tiling))


def check_product(product: Callable[..., Tensor], sizes: tuple[int, ...], width: int, num_rows: int, tiling: object) -> None:
    rows = arithmetic.quantized_rows(torch.randn(num_rows, width))
    bias = torch.randn(sum(sizes))
    weights = [arithmetic.quantized_weight(torch.randn(size, width)) for size in sizes]
    filled = [torch.zeros(num_blocks(size) * 128, width, dtype=torch.uint8) for size in sizes]
    for whole, (codes, _) in zip(filled, weights, strict=True):
        whole[: len(codes)] = codes.view(torch.uint8)
    places, before = [], 0
    for size in sizes:
        places += [(before, size, 128 * block) for block in range(num_blocks(size))]
        before += size
    arrivals = torch.zeros(arithmetic.MAX_SPLIT_TILES, dtype=torch.int32)
    flat = product(
        rows,
        (torch.cat(filled).view(CODES), torch.cat([scales for _, scales in weights])),
        torch.tensor(places, dtype=torch.int32),
        arrivals,
        bias,
        num_columns=before,
        dtype=torch.float32,
        is_even=width % 128 == 0 and not any(size % 16 for size in sizes),
        tiling=tiling,
    )
    assert not arrivals.any()
    parts = flat.split([num_rows * size for size in sizes])
    for part, weight, own in zip(parts, weights, bias.split(sizes), strict=True):
        want = expected_product(rows, weight) + own.double()
        torch.testing.assert_close(part.view(num_rows, -1).double(), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 16, 40, 64, 512, 8192])
@pytest.mark.parametrize(("columns", "inner"), [(8, 8), (20, 76), (152, 20), (1, 1)])
def test_a_tiling_covers_every_block_of_the_sums_once(num_rows: int, columns: int, inner: int) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.fp8.kernels import tiling_of

    tiling = tiling_of(num_rows, columns, inner, 132)
    per_split = -(-inner // tiling.splits)
    assert (tiling.splits - 1) * per_split < inner <= tiling.splits * per_split
    assert 16 <= tiling.rows <= 128
    assert num_rows < 256 or tiling.splits <= inner * 128 // (8 * num_rows) or tiling.splits == 1


@pytest.mark.parametrize("shape", [(5, 256), (3, 300), (1, 2560)])
def test_a_norm_and_a_gate_write_the_codes_of_their_result(shape: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.fp8 import kernels

    rows, up, weight = torch.randn(shape), torch.randn(shape), torch.rand(shape[1])
    normed, norm_codes = kernels.quantized_norm(rows, weight, 1e-6)
    gated, gate_codes = kernels.quantized_gate(rows, up)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(rows, weight.shape, weight, 1e-6))
    torch.testing.assert_close(gated, torch.nn.functional.silu(rows) * up)
    for result, (codes, scales) in ((normed, norm_codes), (gated, gate_codes)):
        expected = kernels.quantized_rows(result)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales, expected[1])
