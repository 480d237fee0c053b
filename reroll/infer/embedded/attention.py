"""The dense KV cache, and the attention of one engine step: a slot's new tokens look at each other and at what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from reroll.errors import ModelError
from reroll.models import exact
from reroll.models.attention import Attention, PackedAttention, Scoring, attend_visible

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


_MAX_SCORES = 1 << 25
"""Scores of one head that are masked at once: bounds the memory of the masks when many tokens continue long contexts."""


_SHORT = 9
"""Steps in which no slot gets more new tokens are one piece of work: padding costs less than a kernel for each kind."""


def work_kind(start: int, length: int) -> tuple[bool, int]:
    """Neighbouring slots whose new tokens are of one kind are worked on together.

    Contexts read from their beginning need no cache. The others are alike up to twice the length, so that padding at
    most doubles them; single tokens come first.
    """
    from_beginning = start == 0 and length > 1
    return from_beginning, 0 if from_beginning else length.bit_length()


class StepAttention:
    """Slot i holds `starts[i]` tokens and gets `lengths[i]` more. Packed tokens are the new ones, in slot order.

    The cache must have room. Slots in order of `work_kind` make the fewest kernels.
    """

    def __init__(self, cache: SlotCache, *, starts: Sequence[int], lengths: Sequence[int]) -> None:
        device = cache.device
        bounds = [0, *accumulate(lengths)]
        slots = np.repeat(np.arange(len(starts)), lengths)
        shifts = np.array(starts) - np.array(bounds[:-1])
        self.positions = torch.from_numpy(np.arange(bounds[-1]) + shifts[slots]).to(device)
        """Where each packed token stands in its sequence."""
        self._cache = cache
        self._rows = cache.rows(torch.from_numpy(slots).to(device), self.positions)
        self._parts: list[tuple[slice, Attention]] = []
        is_short = min(starts) > 0 and max(lengths) <= _SHORT
        kinds = [(False, 0) if is_short else work_kind(*slot) for slot in zip(starts, lengths, strict=True)]
        for (from_beginning, _), run in groupby(range(len(starts)), key=kinds.__getitem__):
            slots_here = list(run)
            first, last = slots_here[0], slots_here[-1]
            part: Attention
            if from_beginning:
                part = PackedAttention(torch.tensor(bounds[first : last + 2], device=device) - bounds[first])
            else:
                here = slice(first, last + 1)
                part = _CachedAttention(cache, first_slot=first, starts=starts[here], lengths=lengths[here])
            self._parts.append((slice(bounds[first], bounds[last + 1]), part))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        self._cache.store(layer, self._rows, key, value)
        outputs = [part.attend(layer, query[span], key[span], value[span], scoring=scoring) for span, part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _CachedAttention:
    """New tokens of consecutive slots, whose keys and values are in the cache already, look at their slots.

    Slots with fewer new tokens than others are padded by repeating their last.
    """

    def __init__(self, cache: SlotCache, *, first_slot: int, starts: Sequence[int], lengths: Sequence[int]) -> None:
        device = cache.device
        self._cache = cache
        self._slots = slice(first_slot, first_slot + len(starts))
        sizes, steps = np.array(lengths)[:, None], np.arange(max(lengths))
        padded = np.minimum(steps, sizes - 1)
        positions = np.array(starts)[:, None] + padded  # [N, M]
        width = -(-(int(positions.max()) + 1) // LENGTH_BLOCK) * LENGTH_BLOCK
        self._positions = torch.from_numpy(positions).to(device)
        self._offsets = torch.arange(min(width, cache.max_length), device=device)
        self._visible: dict[int | None, Tensor] = {}
        self._biases: dict[int | None, Tensor] = {}
        self._pad = self._real = None
        if min(lengths) < max(lengths):
            self._pad = torch.from_numpy(padded + np.cumsum(sizes, 0) - sizes).to(device)
            self._real = torch.from_numpy(np.flatnonzero(steps < sizes)).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        width = len(self._offsets)
        keys, values = self._cache.keys(layer)[self._slots, :, :width], self._cache.values(layer)[self._slots, :, :width]
        visible = self._visible_within(scoring.sliding_window)
        bias = self._bias_within(scoring.sliding_window) if _by_products(keys, visible.shape[1], scoring) else None
        padded = query if self._pad is None else query[self._pad]
        grouped = padded.reshape(*self._positions.shape, keys.shape[1], -1, query.shape[-1]).to(
            keys.dtype
        )  # [N, M, H_kv, G, D]
        num_at_once = max(1, _MAX_SCORES // (visible.shape[0] * width * grouped.shape[3]))
        outputs = []
        for start in range(0, grouped.shape[1], num_at_once):
            some = slice(start, start + num_at_once)
            if bias is not None:
                outputs.append(_attend_by_products(grouped[:, some], keys, values, bias[:, some], scaling=scoring.scaling))
            else:
                outputs.append(_attend(grouped[:, some], keys, values, visible[:, some], scoring))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        output = output.reshape(-1, *query.shape[1:])
        return (output if self._real is None else output[self._real]).to(query.dtype)

    def _visible_within(self, sliding_window: int | None) -> Tensor:
        """What each token may look at, [N, M, L]. Layers with the same window share it."""
        if sliding_window not in self._visible:
            visible = self._offsets <= self._positions[:, :, None]
            if sliding_window is not None:
                visible &= self._offsets > self._positions[:, :, None] - sliding_window
            self._visible[sliding_window] = visible
        return self._visible[sliding_window]

    def _bias_within(self, sliding_window: int | None) -> Tensor:
        """The same as what is added to scores, fp32 [N, M, L]."""
        if sliding_window not in self._biases:
            hidden = ~self._visible_within(sliding_window)
            self._biases[sliding_window] = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
        return self._biases[sliding_window]


def _by_products(keys: Tensor, num_steps: int, scoring: Scoring) -> bool:
    """Whether attention is two plain products: for few bf16 queries on a CPU, up to half as fast again as PyTorch's kernel."""
    is_plain = scoring.softcap is None and scoring.sinks is None and not exact.is_exact()
    return is_plain and num_steps <= _SHORT and keys.dtype == torch.bfloat16 and keys.device.type == "cpu"


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """query and result [N, M, H_kv, G, D], keys and values [N, H_kv, L, D], visible [N, M, L]."""
    num_steps = query.shape[1]
    sinks = None if scoring.sinks is None else scoring.sinks.view(keys.shape[1], -1).repeat_interleave(num_steps, 1)
    attend = exact.arithmetic().attend if exact.is_exact() else attend_visible
    mask = _for_rows(visible, query.shape[3])
    output = attend(_as_rows(query), keys, values, mask, scoring, None if sinks is None else sinks[..., None])
    return _from_rows(output, num_steps)


def _attend_by_products(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scaling: float) -> Tensor:
    """As `_attend`, with bias [N, M, L] added to the scores.

    Of a part of the cache, the product would first make a transposed copy: that takes longer than itself and a plain copy.
    """
    scores = torch.matmul(_as_rows(query), keys.contiguous().transpose(-1, -2))
    weights = torch.add(_for_rows(bias, query.shape[3]), scores, alpha=scaling).softmax(-1)
    return _from_rows(torch.matmul(weights.to(values.dtype), values), query.shape[1])


def _as_rows(query: Tensor) -> Tensor:
    """[N, M, H_kv, G, D] -> [N, H_kv, G * M, D]: heads that share a key are rows of one query."""
    return query.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _from_rows(output: Tensor, num_steps: int) -> Tensor:
    """[N, H_kv, G * M, D] -> [N, M, H_kv, G, D]"""
    num_slots, num_heads, _, dim = output.shape
    return output.reshape(num_slots, num_heads, -1, num_steps, dim).permute(0, 3, 1, 2, 4)


def _for_rows(visible: Tensor, num_sharing: int) -> Tensor:
    """[N, M, L] -> [N, 1, G * M, L], or one row for all where M is 1."""
    return visible[:, None] if visible.shape[1] == 1 else visible[:, None].repeat(1, 1, num_sharing, 1)
