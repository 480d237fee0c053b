"""What travels when weights do: parcels of named tensors, and how they get from one process to another."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reroll.errors import RerollError

Carriage = Literal["ipc", "broadcast", "disk", "store"]
"""How parcels travel between processes."""

ALIGNMENT = 64
"""Tensors start at multiples of so many bytes, so that any dtype can be read where it lies."""


class PushBroken(RerollError):
    """A parcel is missing, out of turn or damaged: nothing of this push may be used, and it must be sent again in full."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is, as far as sharing memory goes."""

    host: str
    """Equal for processes that can see each other's memory."""
    device: str
    """`cpu`, or what tells a GPU from all others."""
    process: int
    """Its id on the host."""

    def is_beside(self, other: Place) -> bool:
        """Whether each can see the other's memory."""
        return (self.host, self.device) == (other.host, other.device)


def place_of(device: str | torch.device) -> Place:
    """This process's place, if it computes on this device."""
    device = torch.device(device)
    if device.type == "cuda":
        return Place(_host(), str(torch.cuda.get_device_properties(device).uuid), os.getpid())
    return Place(_host(), device.type, os.getpid())


def _host() -> str:
    """A container may share a machine and yet see none of the others' processes: then it counts as another host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.uname().nodename}"
    except OSError:
        return f"{os.uname().nodename} without /proc"


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in a process group that is formed at a store."""

    address: str
    """`host:port` of the store."""
    name: str
    """Of the group: a new one for every group that meets there."""
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How parcels travel, as one end of it needs to know."""

    kind: Carriage
    bucket_bytes: int
    """Tensors are sent together up to this size; a larger one travels alone."""
    delta: bool
    """Both ends remember what was sent, so that changes alone can be."""
    folder: Path | None = None
    """Of kind disk."""
    seat: Seat | None = None
    """Of kind broadcast; the sender's rank is 0. Trainers without one only help to gather."""
    senders: tuple[int, ...] = (0,)
    """Ranks of the trainer that send."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes themselves: the runtime carries them."""

    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory of another process of this host, to be mapped."""

    path: str


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Memory of another process on the same GPU: what torch needs to open it."""

    open: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Lent:
    """The tensors themselves, in the memory of another process on the same GPU: one for each entry, in order."""

    handles: tuple[OnGpu, ...]


@dataclass(frozen=True, slots=True)
class LentBefore:
    """The tensors of the last push, in the memory that was lent then."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """The bytes come by broadcast, to whoever joins it."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A safetensors file."""

    path: Path


Payload = Stored | Mapped | OnGpu | Lent | LentBefore | InGroup | OnDisk


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor inside a parcel's bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A part of the weights of one version."""

    version: int
    index: int
    """Parcels of a version are counted from 0."""
    is_last: bool
    """All others of the version came before it."""
    base_version: int | None
    """None: whole tensors. Else what makes them of those of this version."""
    entries: tuple[Entry, ...]
    num_bytes: int
    payload: Payload
    gather_s: float
    """What it took to bring its tensors together."""


def aligned(num_bytes: int) -> int:
    """The next offset at which a tensor may start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def unpack(flat: Tensor, entries: Iterable[Entry]) -> dict[str, Tensor]:
    """The tensors that lie in these bytes, as views."""
    return {entry.name: _view(flat, entry) for entry in entries}


def put(flat: Tensor, entry: Entry, tensor: Tensor) -> None:
    """Write a tensor into the bytes."""
    _view(flat, entry).copy_(tensor)


def _view(flat: Tensor, entry: Entry) -> Tensor:
    num_bytes = entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
    return flat[entry.offset : entry.offset + num_bytes].view(entry.dtype).view(entry.shape)
