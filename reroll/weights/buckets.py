"""Buckets of named tensors, in which weights travel from one process to another, and the engine's end, which opens them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from reroll.config.registry import load_entry
from reroll.errors import RerollError
from reroll.weights.slices import Slice

TransportKind = Literal["ipc", "broadcast", "disk", "store"]
"""How buckets travel between processes: by CUDA IPC or shared memory, a collective, files, or the runtime's store."""

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""

_DEVICE = 6
"""Position of the device index in a handle's arguments: it is the sender's, and may differ in this process."""

# Arrays from the runtime's store are read-only, and are only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)


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
    """Senders come first, then the engines in the order of their ring."""
    size: int
    num_senders: int = 1


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
    """For kind broadcast."""
    senders: tuple[int, ...] = (0,)
    """Ranks of the trainer that send."""
    slices: tuple[tuple[Slice, ...], ...] | None = None
    """What this rank puts into each bucket of a push; None: weights are gathered, and a sender fills its buckets alone."""


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
    """The bytes come in the channel's process group."""


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
    part: Slice | None = None
    """Which part of a weight it is; None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A part of the weights of one version; or what one of several senders has of it."""

    sender: int = 0
    """The trainer's rank."""
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


class Changes(Protocol):
    """What the receiver of a channel with `delta` keeps of every push: the entry point `receiver` of the group
    `reroll.changes`. (`sender` keeps the same at the other end.)"""

    def applied(self, bucket: Bucket, tensors: Mapping[str, Tensor], *, base_version: int | None) -> Mapping[str, Tensor]:
        """Whole tensors, of those of a bucket. Raises PushBroken if they are changes of what is not here: what was taken last
        is `base_version`."""


class PieceReceiver(Protocol):
    """An engine's end of a process group, for kind broadcast: the entry point `broadcast` of the group `reroll.receivers`."""

    def receive(self, pieces: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """Each piece of a bucket when it is whole, with its bytes, which are valid until the next call. Raises PushBroken if
        another member is gone."""

    def close(self) -> None:
        """Leave the group; whoever waits for this engine there fails. Safe to call twice."""


class WeightReceiver:
    """Receives what a `WeightSender` sends through the same channel."""

    def __init__(self, channel: Channel, *, device: torch.device) -> None:
        self._device = device
        open_group = load_entry("reroll.receivers", "broadcast") if channel.group_rank else None
        self._group: PieceReceiver | None = open_group and open_group(channel, device)
        self._changes: Changes | None = load_entry("reroll.changes", "receiver")() if channel.delta else None
        self._shared: dict[str, Tensor] = {}
        """Kept open: opening hundreds of tensors takes longer than copying them."""
        self._confirmed: int | None = None
        self._base: int | None = None
        self._version, self._num_taken = 0, 0

    def open(self, *pieces: Bucket) -> Mapping[str, Tensor]:
        """The weights of the next bucket, of all its senders' pieces, valid until the next call.

        Raises PushBroken if it is not the next, or if its pieces do not add up. The first bucket of a version is always
        accepted: what is left of an earlier version is void.
        """
        if pieces[0].index == 0:
            self._base, self._confirmed = self._confirmed, None
            self._version, self._num_taken = pieces[0].version, 0
        for bucket in pieces:
            if (bucket.version, bucket.index) != (self._version, self._num_taken):
                raise PushBroken(
                    f"bucket {bucket.index} of version {bucket.version} came where {self._num_taken} of {self._version} was due"
                )
        self._num_taken += 1
        parts = ((piece, self._whole(piece, tensors)) for piece, tensors in self._received(pieces))
        if all(entry.part is None for piece in pieces for entry in piece.entries):
            return dict(next(parts)[1])
        return _joined(parts)

    def confirm(self) -> None:
        """The whole version has been received and is in use."""
        self._confirmed = self._version

    def close(self) -> None:
        """Leave the channel; whoever waits in its group fails."""
        if self._group is not None:
            self._group.close()

    def _whole(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._changes is None else self._changes.applied(bucket, tensors, base_version=self._base)

    def _received(self, pieces: Sequence[Bucket]) -> Iterator[tuple[Bucket, Mapping[str, Tensor]]]:
        """Each piece, with its tensors, which are valid until the next bucket."""
        if self._group is not None:
            yield from ((piece, unpack(flat, piece.entries)) for piece, flat in self._group.receive(pieces))
            return
        for piece in pieces:
            yield piece, self._given(piece)

    def _given(self, bucket: Bucket) -> Mapping[str, Tensor]:
        match bucket.payload:
            case OnDisk(path):
                return safetensors.torch.load_file(path)
            case Stored(data):
                flat = torch.from_numpy(data)
            case Mapped(path):
                flat = torch.from_file(path, shared=True, size=bucket.num_bytes, dtype=torch.uint8)
            case IpcHandle():
                flat = self._opened(bucket.payload)
            case IpcTensors(handles):
                self._shared = {entry.name: self._opened(handle) for entry, handle in zip(bucket.entries, handles, strict=True)}
                return self._shared
            case SameIpcTensors():
                return self._shared
            case InGroup():
                raise PushBroken("a bucket comes in a process group, and this engine is in none")
        return unpack(flat, bucket.entries)

    def _opened(self, handle: IpcHandle) -> Tensor:
        before, after = handle.arguments[:_DEVICE], handle.arguments[_DEVICE + 1 :]
        tensor: Tensor = handle.open(*before, self._device.index or 0, *after)
        return tensor


def _joined(parts: Iterable[tuple[Bucket, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Whole weights of their parts. Raises PushBroken if some part is missing, or there twice."""
    joined: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for piece, tensors in parts:
        for part in (entry.part for entry in piece.entries):
            assert part is not None
            tensor = tensors[part.name]
            if part.name not in joined:
                joined[part.name] = torch.empty(part.shape, dtype=tensor.dtype, device=tensor.device)
                missing[part.name] = joined[part.name].numel()
            missing[part.name] -= tensor.numel()
            here = [slice(begin, begin + length) for begin, length in zip(*part.box, strict=True)]
            joined[part.name][tuple(here)] = tensor.view(part.box.shape)
    torn = sorted(name for name, count in missing.items() if count)
    if torn:
        raise PushBroken(f"the parts of {torn[0]} that came do not make the whole")
    return joined
