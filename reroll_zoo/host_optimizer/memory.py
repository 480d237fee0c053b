"""Host memory that copies to and from a GPU run at the speed of the bus: page-locked, and none of it for nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from reroll.errors import ModelError

K = TypeVar("K", bound=Hashable)

BLOCK_VALUES = 2**28
"""Of a block (1 GiB), unless one tensor is larger."""
ALIGNED_VALUES = 16
"""A tensor begins at a multiple of 64 bytes, as kernels like it."""
FP32_BYTES = 4
GIB = 2**30


def host_tensors(sizes: Mapping[K, torch.Size], *, pinned: bool) -> dict[K, Tensor]:
    """fp32 zeros of these shapes, each with a storage of its own, so that one can be written to a file without the others.

    PyTorch rounds page-locked memory up to a power of two: a third more for a layer of a common size. So what is taken are
    blocks of such a size, and tensors lie in them side by side. Raises ModelError if the host has no room.
    """
    blocks: list[Tensor] = []
    ends: list[int] = []
    found: dict[K, Tensor] = {}
    left = sum(_room(size) for size in sizes.values())
    for key in sorted(sizes, key=lambda key: _room(sizes[key]), reverse=True):
        size, room = sizes[key], _room(sizes[key])
        number = next((number for number, block in enumerate(blocks) if ends[number] + room <= len(block)), len(blocks))
        if number == len(blocks):
            blocks.append(_block(min(max(room, BLOCK_VALUES), left), pinned=pinned))
            ends.append(0)
        start = ends[number]
        # By way of numpy, which shares the memory and gives the part a storage of its own.
        found[key] = torch.from_numpy(blocks[number].numpy()[start : start + size.numel()]).view(size)
        ends[number] += room
        left -= room
    return found


def _room(size: torch.Size) -> int:
    return -(-size.numel() // ALIGNED_VALUES) * ALIGNED_VALUES


def _block(at_least: int, *, pinned: bool) -> Tensor:
    length = 2 ** math.ceil(math.log2(at_least))
    try:
        return torch.empty(length, dtype=torch.float32, pin_memory=pinned).zero_()
    except RuntimeError as error:
        raise ModelError(
            f"the host has no room for {length * FP32_BYTES / GIB:.2f} GiB more of optimizer state ({error}): train an adapter "
            "(lora), a smaller model, or on more devices (strategy.kind=fsdp2)"
        ) from error
