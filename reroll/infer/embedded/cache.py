"""The key-value cache: dense slots, so that decoding works on contiguous views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reroll.models.attention import PackedAttention, attend_visible

_LENGTH_BLOCK = 64
"""Lengths grow in multiples of this."""


class SlotCache:
    """Keys and values of the running sequences. Sequence i of n lives in slot i; slots n and up are free.

    One tensor [layers, 2, slots, heads, length, dim]: moving or copying a slot is one operation over all layers.
    """

    def __init__(self, *, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.zeros((num_layers, 2, 0, num_heads, 0, head_dim), dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self._data.shape[2]

    @property
    def max_length(self) -> int:
        return self._data.shape[4]

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def reserve(self, *, num_slots: int, length: int) -> None:
        """Make room for this many slots of this length; grows by half at least, so that growing stays rare."""
        old = self._data
        if num_slots <= old.shape[2] and length <= old.shape[4]:
            return
        if num_slots > old.shape[2]:
            num_slots = max(num_slots, old.shape[2] * 3 // 2)
        if length > old.shape[4]:
            length = max(length, old.shape[4] * 3 // 2)
        num_slots, length = max(num_slots, old.shape[2]), max(-(-length // _LENGTH_BLOCK) * _LENGTH_BLOCK, old.shape[4])
        # Zeros, not empty memory: masked places still enter the products, where a stray NaN would survive.
        self._data = old.new_zeros((*old.shape[:2], num_slots, old.shape[3], length, old.shape[5]))
        self._data[:, :, : old.shape[2], :, : old.shape[4]] = old

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Slot `target` gets the first `length` places of slot `source`."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def keys(self, layer: int) -> Tensor:
        """[slots, heads, length, dim], a view."""
        return self._data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[slots, heads, length, dim], a view."""
        return self._data[layer, 1]

    def rows(self, slots: Tensor, places: Tensor) -> Tensor:
        """Where tokens at these slots and places go, as `store` takes it. Valid until the cache grows."""
        num_heads, length = self._data.shape[3:5]
        heads = torch.arange(num_heads, device=slots.device)
        return ((slots[:, None] * num_heads + heads) * length + places[:, None]).flatten()

    def store(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, heads, dim] to their `rows`."""
        for part, tensor in ((self._data[layer, 0], key), (self._data[layer, 1], value)):
            part.view(-1, part.shape[-1]).index_copy_(0, rows, tensor.to(part.dtype).reshape(-1, part.shape[-1]))

    def free(self) -> None:
        """Give the memory back; every slot is lost."""
        shape = self._data.shape
        self._data = self._data.new_zeros((*shape[:2], 0, shape[3], 0, shape[5]))


class StepAttention:
    """Attention of one engine step. Packed tokens: one for each of the first slots (decode), then whole contexts (prefill).

    `lengths[i]` counts what slot i holds before this step: its new token goes to that place. Context j of
    `prefill_lengths` goes to slot `prefill_slots[j]`. The cache must have room.
    """

    def __init__(
        self,
        cache: SlotCache,
        *,
        lengths: Sequence[int],
        prefill_slots: Sequence[int] = (),
        prefill_lengths: Sequence[int] = (),
    ) -> None:
        device = cache.keys(0).device
        self._cache = cache
        self._num_decode = len(lengths)
        self._places = torch.tensor(lengths, device=device, dtype=torch.int64)
        self._prefill = None
        slots, places = torch.arange(len(lengths), device=device), self._places
        if lengths:
            width = -(-(max(lengths) + 1) // _LENGTH_BLOCK) * _LENGTH_BLOCK
            self._offsets = torch.arange(min(width, cache.max_length), device=device)
            self._visible = self._offsets <= self._places[:, None]
        if prefill_lengths:
            bounds = torch.tensor([0, *prefill_lengths], device=device).cumsum(0)
            self._prefill = PackedAttention(bounds)
            spans = torch.tensor(prefill_lengths, device=device)
            prefill_places = torch.arange(sum(prefill_lengths), device=device) - bounds[:-1].repeat_interleave(spans)
            slots = torch.cat([slots, torch.tensor(prefill_slots, device=device).repeat_interleave(spans)])
            places = torch.cat([places, prefill_places])
        self._rows = cache.rows(slots, places)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self._cache.store(layer, self._rows, key, value)
        n, outputs = self._num_decode, []
        if n:
            outputs.append(self._decode(layer, query[:n], scaling=scaling, sliding_window=sliding_window, softcap=softcap))
        if self._prefill is not None:
            fresh = query[n:], key[n:], value[n:]
            output = self._prefill.attend(layer, *fresh, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self, layer: int, query: Tensor, *, scaling: float, sliding_window: int | None, softcap: float | None
    ) -> Tensor:
        n, width = self._num_decode, len(self._offsets)
        keys, values = self._cache.keys(layer)[:n, :, :width], self._cache.values(layer)[:n, :, :width]
        # Heads that share a key are rows of one query.
        grouped = query.reshape(n, keys.shape[1], -1, query.shape[-1]).to(keys.dtype)
        visible = self._visible
        if sliding_window is not None and sliding_window < width:
            visible = visible & (self._offsets > self._places[:, None] - sliding_window)
        if softcap is None and keys.dtype == torch.bfloat16 and keys.device.type == "cpu":
            output = _attend_by_products(grouped, keys, values, visible[:, None, None], scaling=scaling)
        else:
            output = attend_visible(grouped, keys, values, visible[:, None, None], scaling=scaling, softcap=softcap)
        return output.reshape(query.shape).to(query.dtype)


def _attend_by_products(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *, scaling: float) -> Tensor:
    """Attention as two plain products: for a few bf16 queries on a CPU, twice as fast as PyTorch's attention kernel."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float().mul_(scaling)
    weights = scores.masked_fill_(~visible, float("-inf")).softmax(-1)
    return torch.matmul(weights.to(values.dtype), values)
