"""Tensors that leave a GPU and come back, at the speed of the bus."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class PageLocked:
    """Host memory that the bus reads and writes many times as fast as other, one place for each key.

    Such memory is slow to get. So a place is kept for the next tensor of its key.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, Tensor] = {}

    def filled(self, key: Hashable, tensor: Tensor) -> Tensor:
        """The key's place, where a tensor of a GPU is when that has done all it was given."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return place.copy_(tensor, non_blocking=True)


class HostRoom:
    """Where tensors wait that leave a GPU again and again.

    On the way back they travel beside what the GPU computes, so that what is needed last is not waited for first.
    """

    def __init__(self) -> None:
        self._places = PageLocked()
        self._way_back: torch.cuda.Stream | None = None

    def moved(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """This tensor on the device. The key tells it from others.

        Its contents are there after `settle`; what a GPU computes after `arrive` finds them too.
        """
        if tensor.device.type == device.type:
            return tensor
        if device.type == "cpu":
            return self._places.filled(key, tensor)
        if device.type != "cuda":
            return tensor.to(device)
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


def settle(device: torch.device) -> None:
    """The host waits until all is where it was sent."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
