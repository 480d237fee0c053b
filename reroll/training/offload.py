"""Moving tensors between a GPU and pinned host memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class PinnedBuffers:
    """Page-locked host buffers, one for each key: copies to and from a GPU run at the speed of the bus.

    Such memory is slow to allocate, so a buffer is kept for the next tensor of its key.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def filled(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Start copying a GPU tensor into the key's buffer; returns the buffer, which is valid once the GPU is synchronized."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return buffer.copy_(tensor, non_blocking=True)


class PinnedOffload:
    """Moves tensors out of a GPU into pinned memory, and back on a stream of its own, beside what the GPU computes."""

    def __init__(self) -> None:
        self._buffers = PinnedBuffers()
        self._prefetch: torch.cuda.Stream | None = None

    def moved(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """This tensor on the device; `key` names its buffer. Its contents are there after `synchronize`, or, for what the
        GPU computes, after `wait_for_prefetch`."""
        if tensor.device.type == device.type:
            return tensor
        if device.type == "cpu":
            return self._buffers.filled(key, tensor)
        if device.type != "cuda":
            return tensor.to(device)
        if self._prefetch is None:
            self._prefetch = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        there = torch.empty_like(tensor, device=device)
        self._prefetch.wait_stream(torch.cuda.current_stream(device))  # Whose memory it was until now.
        with torch.cuda.stream(self._prefetch):
            return there.copy_(tensor, non_blocking=True)

    def wait_for_prefetch(self) -> None:
        """Have the GPU wait for the copies back to it. The host does not wait."""
        if self._prefetch is not None:
            torch.cuda.current_stream(self._prefetch.device).wait_stream(self._prefetch)


def synchronize(device: torch.device) -> None:
    """Have the host wait for a GPU, copies included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
