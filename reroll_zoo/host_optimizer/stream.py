"""Pieces of what lies on the host, taken through a device: one is copied in and one copied out while one is worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from reroll_zoo.host_optimizer import NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts of fp32 tensors on the host, equally long."""

    host: tuple[Tensor, ...]
    work: Callable[[Sequence[Tensor]], None]
    """What to do with their copies on the device, in place."""

    @property
    def length(self) -> int:
        return len(self.host[0])


def take_through(device: torch.device, pieces: Sequence[Piece]) -> None:
    """Work on every piece, in order. When this returns, the host has what became of them."""
    if not pieces:
        return
    width, longest = max(len(piece.host) for piece in pieces), max(piece.length for piece in pieces)
    slots = [torch.empty(width, longest, device=device) for _ in range(min(NUM_SLOTS, len(pieces)))]
    lanes = _Lanes(device, len(slots))
    for number, piece in enumerate(pieces):
        slot = number % len(slots)
        there = [row[: piece.length] for row in slots[slot][: len(piece.host)]]
        with lanes.copying_in(slot):
            for copy, part in zip(there, piece.host, strict=True):
                copy.copy_(part, non_blocking=True)
        with lanes.working(slot):
            piece.work(there)
        with lanes.copying_out(slot):
            for copy, part in zip(there, piece.host, strict=True):
                part.copy_(copy, non_blocking=True)
    lanes.wait()


class _Lanes:
    """Three CUDA streams that wait for each other slot by slot; the second is the current one. On a CPU all is in order."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._is_gpu = device.type == "cuda"
        if not self._is_gpu:
            return
        self._current = torch.cuda.current_stream(device)
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in.wait_stream(self._current)  # Whose memory the slots were until now.
        self._filled, self._worked, self._emptied = ([torch.cuda.Event() for _ in range(num_slots)] for _ in range(3))  # type: ignore[no-untyped-call]

    @contextmanager
    def copying_in(self, slot: int) -> Iterator[None]:
        if not self._is_gpu:
            yield
            return
        with torch.cuda.stream(self._in):
            self._in.wait_event(self._emptied[slot])
            yield
            self._filled[slot].record(self._in)

    @contextmanager
    def working(self, slot: int) -> Iterator[None]:
        if self._is_gpu:
            self._current.wait_event(self._filled[slot])
        yield
        if self._is_gpu:
            self._worked[slot].record(self._current)

    @contextmanager
    def copying_out(self, slot: int) -> Iterator[None]:
        if not self._is_gpu:
            yield
            return
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._worked[slot])
            yield
            self._emptied[slot].record(self._out)

    def wait(self) -> None:
        """Have the host wait for the last copy out, which comes after all else."""
        if self._is_gpu:
            self._out.synchronize()
