"""Buckets of named tensors, in which weights travel from one process to another, and the engine's end, which opens them."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from reroll.errors import RerollError

TransportKind = Literal["ipc", "broadcast", "disk", "store"]
"""How buckets travel between processes: by CUDA IPC or shared memory, a collective, files, or the runtime's store."""

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""

GROUP_TIMEOUT = timedelta(minutes=2)
"""For all members to come, and for one bucket to arrive. A member that died is noticed sooner: its connections close."""

_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
"""The checksum of all that follows it, then the length of the compressed bits, which come next."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are compared as integers: NaN equals itself, and 0.0 does not equal -0.0."""

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
    """For kind broadcast; the sender's rank is 0."""
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


def encode_change(new: Tensor, *, base: Tensor) -> Tensor:
    """[bytes] what `apply_change` needs to make `new` of `base`. Both lie on the host, in the same dtype and shape."""
    bits, before = _bits(new), _bits(base)
    changed = bits != before
    mask = zlib.compress(np.packbits(changed.numpy()).tobytes(), level=1)
    body = _LENGTH.pack(len(mask)) + mask + bits[changed].numpy().tobytes()
    return torch.frombuffer(bytearray(_CHECKSUM.pack(zlib.crc32(body)) + body), dtype=torch.uint8)


def apply_change(coded: Tensor, *, base: Tensor) -> None:
    """Turn `base` into the tensor that was encoded, in place. Raises PushBroken if the bytes are not what was sent."""
    data = memoryview(coded.numpy().tobytes())
    body = data[_CHECKSUM.size :]
    if len(body) < _LENGTH.size or _CHECKSUM.unpack_from(data) != (zlib.crc32(body),):
        raise PushBroken("a change of weights was damaged on its way: its checksum does not match")
    (num_mask_bytes,) = _LENGTH.unpack_from(body)
    mask, values = body[_LENGTH.size :][:num_mask_bytes], bytearray(body[_LENGTH.size + num_mask_bytes :])
    bits = _bits(base)
    packed = np.frombuffer(zlib.decompress(mask), dtype=np.uint8)
    changed = torch.from_numpy(np.unpackbits(packed, count=bits.numel()).astype(bool))
    if values:
        bits[changed] = torch.frombuffer(values, dtype=bits.dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize])


class BroadcastGroup:
    """The process group of a push, apart from the trainer's own: rank 0 sends, the others receive. NCCL on GPUs, else gloo."""

    def __init__(self, group_rank: GroupRank, device: torch.device) -> None:
        host, _, port = group_rank.address.rpartition(":")
        # The store counts who comes to it: a prefix keeps groups that meet here one after the other apart.
        store = PrefixStore(group_rank.name, TCPStore(host, int(port), is_master=False, timeout=GROUP_TIMEOUT))
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # Builds for CPUs lack it.

            torch.cuda.set_device(device)
            options = ProcessGroupNCCL.Options()
            options._timeout = GROUP_TIMEOUT
            self._group: Any = ProcessGroupNCCL(store, group_rank.rank, group_rank.size, options)
        else:
            self._group = ProcessGroupGloo(store, group_rank.rank, group_rank.size, timeout=GROUP_TIMEOUT)

    def broadcast(self, flat: Tensor) -> Work:
        """Begin to send these bytes (rank 0), or to fill them (the others); they are not to be touched until it is done."""
        work: Work = self._group.broadcast(flat, 0)
        return work

    def leave(self) -> None:
        """Give the connections up; whoever waits for them fails. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # This ends what NCCL has under way; gloo closes connections when the last reference goes.


class WeightReceiver:
    """Receives what a `WeightSender` sends through the same channel."""

    def __init__(self, channel: Channel, *, device: torch.device) -> None:
        self._device = device
        self._group = BroadcastGroup(channel.group_rank, device) if channel.group_rank else None
        self._keeps = channel.delta
        self._kept: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        """Kept open: opening hundreds of tensors takes longer than copying them."""
        self._confirmed: int | None = None
        self._base: int | None = None
        self._version, self._num_taken = 0, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The tensors of the next bucket, valid until the next call. Raises PushBroken if it is not the next.

        The first bucket of a version is always accepted: what is left of an earlier version is void.
        """
        if bucket.index == 0:
            self._base, self._confirmed = self._confirmed, None
            self._version, self._num_taken = bucket.version, 0
        if (bucket.version, bucket.index) != (self._version, self._num_taken):
            raise PushBroken(
                f"bucket {bucket.index} of version {bucket.version} came where {self._num_taken} of {self._version} was due"
            )
        self._num_taken += 1
        tensors = self._received(bucket)
        if not self._keeps:
            return tensors
        if bucket.base_version is None:
            kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        else:
            kept = self._changed(tensors, base_version=bucket.base_version)
        self._kept |= kept
        return kept

    def confirm(self) -> None:
        """The whole version has been received and is in use."""
        self._confirmed = self._version

    def close(self) -> None:
        """Leave the channel; whoever waits in its group fails."""
        if self._group is not None:
            self._group.leave()

    def _changed(self, changes: Mapping[str, Tensor], *, base_version: int) -> dict[str, Tensor]:
        if base_version != self._base or not changes.keys() <= self._kept.keys():
            raise PushBroken(f"changes since version {base_version} came, but version {self._base} is what is here")
        for name, coded in changes.items():
            apply_change(coded.cpu(), base=self._kept[name])
        return {name: self._kept[name] for name in changes}

    def _received(self, bucket: Bucket) -> Mapping[str, Tensor]:
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
                flat = self._broadcast(bucket.num_bytes)
        return unpack(flat, bucket.entries)

    def _opened(self, handle: IpcHandle) -> Tensor:
        before, after = handle.arguments[:_DEVICE], handle.arguments[_DEVICE + 1 :]
        tensor: Tensor = handle.open(*before, self._device.index or 0, *after)
        return tensor

    def _broadcast(self, num_bytes: int) -> Tensor:
        assert self._group is not None
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        flat = self._buffer[:num_bytes]
        self._group.broadcast(flat).wait()
        return flat
