"""Tensors that leave a GPU and come back, at the speed of the bus."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class HostRoom:
    """Page-locked host memory for tensors that leave a GPU again and again.

    Such memory is slow to get and fast to copy to: a tensor's place is kept for the next time while it is away on the GPU.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, Tensor] = {}
        self._gpu: torch.device | None = None

    def moved(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """This tensor on the device, where its contents arrive by `settle`. The key tells it from others."""
        if tensor.device.type == device.type:
            return tensor
        self._gpu = next((each for each in (tensor.device, device) if each.type == "cuda"), None)
        if device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = torch.empty_like(tensor, device=device, pin_memory=True)
        return place.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        """Wait for all that is under way."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
