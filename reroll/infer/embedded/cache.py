"""The key-value cache: dense slots, so that decoding works on contiguous views."""

from __future__ import annotations

import torch
from torch import Tensor

from reroll.errors import ModelError

LENGTH_BLOCK = 64
"""Lengths grow in multiples of this."""


def check_fits(key: Tensor, *, num_heads: int, head_dim: int) -> None:
    """Raise ModelError unless keys [T, heads, dim] of a layer are as the cache, which is the same for all layers, has them."""
    if key.shape[1:] != (num_heads, head_dim):
        raise ModelError(
            f"this model has a layer with {key.shape[1]} key heads of {key.shape[2]}, where its config tells of {num_heads} of "
            f"{head_dim}: the embedded engine takes models whose layers are alike (set engine.kind to vllm)"
        )


class SlotCache:
    """Keys and values of the running sequences. Sequence i of n lives in slot i; slots n and up are free.

    One tensor [layers, 2, slots, heads, length, dim]: moving or copying a slot is one operation over all layers.
    """

    def __init__(self, *, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.zeros((num_layers, 2, 0, num_heads, 0, head_dim), dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def num_slots(self) -> int:
        return self._data.shape[2]

    @property
    def max_length(self) -> int:
        return self._data.shape[4]

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    @property
    def bytes_per_token(self) -> int:
        num_layers, _, _, num_heads, _, head_dim = self._data.shape
        return num_layers * 2 * num_heads * head_dim * self._data.element_size()

    def reserve(self, *, num_slots: int, length: int) -> None:
        """Make room for this many slots of this length; grows by half at least, so that growing stays rare."""
        old = self._data
        if num_slots <= old.shape[2] and length <= old.shape[4]:
            return
        if num_slots > old.shape[2]:
            num_slots = max(num_slots, old.shape[2] * 3 // 2)
        if length > old.shape[4]:
            length = max(length, old.shape[4] * 3 // 2)
        num_slots, length = max(num_slots, old.shape[2]), max(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, old.shape[4])
        # Zeros, not empty memory: masked places still enter the products, where a stray NaN would survive.
        self._data = old.new_zeros((*old.shape[:2], num_slots, old.shape[3], length, old.shape[5]))
        self._data[:, :, : old.shape[2], :, : old.shape[4]] = old

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Slot `target` gets the first `length` places of slot `source`."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def save_prefix(self, slot: int, *, length: int) -> Tensor:
        """A copy of the first `length` places of a slot, as `restore_prefix` takes it."""
        return self._data[:, :, slot, :, :length].clone()

    def restore_prefix(self, slot: int, saved: Tensor, *, length: int) -> None:
        """The slot gets the first `length` places of what `save_prefix` gave."""
        self._data[:, :, slot, :, :length] = saved[:, :, :, :length]

    def keys(self, layer: int) -> Tensor:
        """[slots, heads, length, dim], a view."""
        return self._data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[slots, heads, length, dim], a view."""
        return self._data[layer, 1]

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the keys, then the values, of tokens at these slots and places go, as `store` takes it. Valid until the cache
        grows."""
        num_slots, num_heads, length = self._data.shape[2:5]
        heads = torch.arange(num_heads, device=slots.device)
        rows = ((slots[:, None] * num_heads + heads) * length + positions[:, None]).flatten()
        return torch.cat((rows, rows + num_slots * num_heads * length))

    def store(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, heads, dim] to their `rows`."""
        check_fits(key, num_heads=self._data.shape[3], head_dim=self._data.shape[5])
        both = self._data[layer].view(-1, self._data.shape[5])
        both.index_copy_(0, rows, torch.stack((key, value)).to(both.dtype).view(-1, both.shape[1]))

    def free(self) -> None:
        """Give the memory back; every slot is lost."""
        shape = self._data.shape
        self._data = self._data.new_zeros((*shape[:2], 0, shape[3], 0, shape[5]))
