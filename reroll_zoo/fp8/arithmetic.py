"""What 8-bit weights and inputs mean: codes in e4m3, and a scale in fp32 for each block of them.

A block is 128 x 128 of a weight, and 128 numbers of a row of its input. Its scale puts its largest number on 448, the largest
that e4m3 holds. This is the definition, in plain PyTorch for any device; a GPU runs `kernels`, which must give the same codes
and scales, and products that differ by the order of sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Numbers under one scale: of a row, and of a weight in both directions."""
LARGEST = 448.0
"""The largest number of e4m3."""
TINY = 1e-30
"""A block without any larger number keeps its zeros, under a scale of 1."""

CODES = torch.float8_e4m3fn

MAX_SPLIT_TILES = 1024
"""Tiles of a product whose sums the kernels may split: there are fewer of them than processors."""


def num_blocks(size: int) -> int:
    """Into how many blocks so many numbers are cut, the last of which may be short."""
    return -(-size // BLOCK)


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] of a weight [N, K], and the scales of its blocks."""
    rows, columns = weight.shape
    tiles = _cut(_cut(weight.float(), dim=1), dim=0)  # [N / 128, 128, K / 128, 128]
    scales = _scales(tiles.abs().amax((1, 3)))
    codes = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return codes[:rows, :columns].to(CODES), scales


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, K] of rows [T, K], and the scales [T, K / 128] of their blocks."""
    blocks = _cut(rows.float(), dim=1)
    scales = _scales(blocks.abs().amax(2))
    return (blocks / scales[:, :, None]).flatten(1)[:, : rows.shape[1]].to(CODES), scales


def product(rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    """[T, N] in fp32: codes and scales of rows times those of a weight, block by block."""
    (codes, scales), (weight_codes, weight_scales) = rows, weight
    total = torch.zeros(len(codes), len(weight_codes), device=codes.device)
    for block in range(scales.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        of_columns = weight_scales[:, block].repeat_interleave(BLOCK)[: len(weight_codes)]
        total += codes[:, part].float() @ weight_codes[:, part].float().T * scales[:, block, None] * of_columns
    return total


def _scales(largest: Tensor) -> Tensor:
    whole = largest / torch.full_like(largest, LARGEST)  # By a plain number, a GPU multiplies by one over it.
    return torch.where(largest > TINY, whole, 1.0)


def _cut(tensor: Tensor, *, dim: int) -> Tensor:
    """A dimension as blocks of 128, the last filled up with zeros."""
    spare = -tensor.shape[dim] % BLOCK
    filled = pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, spare])
    return filled.view(*filled.shape[:dim], -1, BLOCK, *filled.shape[dim + 1 :])
