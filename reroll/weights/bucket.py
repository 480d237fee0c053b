"""Buckets of named tensors, in which weights travel from one process to another, and what their payload may be."""

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

TransportKind = Literal["ipc", "broadcast", "disk", "store"]
"""How buckets travel between processes: by CUDA IPC or shared memory, a collective, files, or the runtime's store."""

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""


class PushBroken(RerollError):
    """A bucket is missing, out of order or damaged: nothing of this push may be used, and it must be sent again in full."""


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """The host and the device of a process: whose memory it can see."""

    host: str
    """Equal for processes that can see each other's memory."""
    device: str
    """`cpu`, or the UUID of the GPU."""
    process: int
    """Process id on the host."""

    def can_share_memory_with(self, other: ProcessLocation) -> bool:
        """Whether each can see the other's memory."""
        return (self.host, self.device) == (other.host, other.device)


def location_of(device: str | torch.device) -> ProcessLocation:
    """The location of this process, if it computes on this device."""
    device = torch.device(device)
    if device.type == "cuda":
        return ProcessLocation(_host(), str(torch.cuda.get_device_properties(device).uuid), os.getpid())
    return ProcessLocation(_host(), device.type, os.getpid())


def _host() -> str:
    """A container may share a machine and yet see none of the others' processes: then it counts as another host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.uname().nodename}"
    except OSError:
        return f"{os.uname().nodename} without /proc"


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A member's rank in a process group, and the TCP store at which the group meets."""

    address: str
    """`host:port` of the store."""
    name: str
    """Name of the group, used once: stores are shared."""
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How buckets travel, as one of its two ends needs to know."""

    kind: TransportKind
    bucket_bytes: int
    """Tensors share a bucket up to this size; a larger tensor gets a bucket of its own."""
    delta: bool
    """Both ends keep what was sent last, so that only changes need to be sent."""
    folder: Path | None = None
    """Where buckets are written, for kind disk."""
    group_rank: GroupRank | None = None
    """For kind broadcast; the sender's rank is 0. Trainers without one only take part in the gathers."""
    senders: tuple[int, ...] = (0,)
    """Ranks of the trainer that send."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes themselves: the runtime's store carries them."""

    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Shared memory of another process on this host, to be mapped."""

    path: str


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """A CUDA IPC handle: memory of another process on the same GPU, and what torch needs to open it."""

    open: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class IpcTensors:
    """The sender's own tensors, by CUDA IPC: one handle for each entry, in order."""

    handles: tuple[IpcHandle, ...]


@dataclass(frozen=True, slots=True)
class SameIpcTensors:
    """The same tensors as in the last push, at the same addresses: the receiver has them open."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """The bytes come by broadcast in the channel's process group."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A safetensors file."""

    path: Path


Payload = Stored | Mapped | IpcHandle | IpcTensors | SameIpcTensors | InGroup | OnDisk


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor inside a bucket's bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A part of the weights of one version."""

    version: int
    index: int
    """Position among the buckets of its version, from 0."""
    is_last: bool
    """All others of the version came before it."""
    base_version: int | None
    """None: full tensors. Else changes relative to this version."""
    entries: tuple[Entry, ...]
    num_bytes: int
    payload: Payload
    gather_s: float
    """Seconds spent gathering its tensors."""


def aligned(num_bytes: int) -> int:
    """The next offset at which a tensor may start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def unpack(flat: Tensor, entries: Iterable[Entry]) -> dict[str, Tensor]:
    """The tensors that lie in these bytes, as views."""
    return {entry.name: _view(flat, entry) for entry in entries}


def put(flat: Tensor, entry: Entry, tensor: Tensor) -> None:
    """Copy a tensor into the bytes, at its entry."""
    _view(flat, entry).copy_(tensor)


def _view(flat: Tensor, entry: Entry) -> Tensor:
    num_bytes = entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
    return flat[entry.offset : entry.offset + num_bytes].view(entry.dtype).view(entry.shape)
