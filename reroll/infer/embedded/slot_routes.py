"""The experts that computed what the slots of the KV cache hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.infer.embedded.attention import LENGTH_BLOCK
from reroll.models.routing import RouteShape


class SlotRoutes:
    """For each slot and place, where its token went: [slots, length, layers, top_k]. Moves as the slots of the cache do."""

    def __init__(self, shape: RouteShape, device: torch.device) -> None:
        self._data = torch.zeros((0, 0, shape.num_layers, shape.top_k), dtype=shape.dtype, device=device)

    def reserve(self, *, num_slots: int, length: int) -> None:
        """Make room, as the cache does."""
        old = self._data
        if num_slots > old.shape[0]:
            num_slots = max(num_slots, old.shape[0] * 3 // 2)
        if length > old.shape[1]:
            length = max(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, old.shape[1] * 3 // 2)
        if num_slots > old.shape[0] or length > old.shape[1]:
            shape = (max(num_slots, old.shape[0]), max(length, old.shape[1]), *old.shape[2:])
            self._data = old.new_zeros(shape)
            self._data[: old.shape[0], : old.shape[1]] = old

    def store(self, taken: Tensor, positions: Tensor, *, lengths: Sequence[int]) -> None:
        """Slot i's next `lengths[i]` tokens, packed, stand at these positions."""
        slots = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(taken.device)
        self._data[slots, positions] = taken

    def copy(self, source: int, target: int, *, length: int) -> None:
        self._data[target, :length] = self._data[source, :length]

    def save(self, slot: int, *, length: int) -> Tensor:
        return self._data[slot, :length].clone()

    def restore(self, slot: int, saved: Tensor, *, length: int) -> None:
        self._data[slot, :length] = saved[:length]

    def of(self, slot: int, start: int, end: int) -> NDArray[Any]:
        """A copy that nobody writes to."""
        return self._data[slot, start:end].cpu().numpy().copy()

    def free(self) -> None:
        self._data = self._data.new_zeros((0, 0, *self._data.shape[2:]))
