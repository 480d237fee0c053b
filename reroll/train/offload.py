"""Tensors that leave a GPU and come back, at the speed of the bus."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class HostRoom:
    """Page-locked host memory for tensors that leave a GPU again and again.

    Such memory is slow to get and fast to copy to: a tensor's place is kept for the next time while it is away on the GPU.
    On the way back they travel beside what the GPU computes, so that what is needed last is not waited for first.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, Tensor] = {}
        self._way_back: torch.cuda.Stream | None = None

    def moved(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """This tensor on the device, where its contents are after `settle`. The key tells it from others."""
        if tensor.device.type == device.type:
            return tensor
        if device.type == "cpu":
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = torch.empty_like(tensor, device=device, pin_memory=True)
            return place.copy_(tensor, non_blocking=True)
        if self._way_back is None:
            self._way_back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        there = torch.empty_like(tensor, device=device)
        self._way_back.wait_stream(torch.cuda.current_stream(device))  # Whose memory it was until now.
        with torch.cuda.stream(self._way_back):
            return there.copy_(tensor, non_blocking=True)

    def arrive(self) -> None:
        """From here on the GPU works with what was on its way back. The host does not wait."""
        if self._way_back is not None:
            torch.cuda.current_stream(self._way_back.device).wait_stream(self._way_back)

    def settle(self, gpu: torch.device) -> None:
        """The host waits until all is where it was sent."""
        if gpu.type == "cuda":
            torch.cuda.synchronize(gpu)
