"""Buckets of named tensors, in which weights travel from one process to another, and the engine's end, which opens them."""

from __future__ import annotations

import itertools
import os
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from reroll.weights.slices import Hop, Ring, Slice

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


class PushGroup:
    """The process group of a push, apart from the trainer's own: senders, and the ring of engines. NCCL on GPUs, else gloo."""

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
        self._rank, self._num_senders = group_rank.rank, group_rank.num_senders
        self.ring = Ring(self._num_senders, group_rank.size - self._num_senders)
        self._greet(device)

    @property
    def hops(self) -> list[Hop]:
        """Of an engine: the chunks of a bucket in the order in which they come."""
        return list(self.ring.hops(self._rank - self._num_senders))

    def send(self, flat: Tensor) -> list[Work]:
        """Of a sender: begin to send its piece of a bucket; it is not to be touched until all is done."""
        parts = [(chunk, flat[self.ring.part(flat.numel(), chunk)]) for chunk in range(self.ring.num_chunks)]
        return [self._send(part, self.ring.entry_of(self._rank, chunk)) for chunk, part in parts if part.numel()]

    def pass_on(self, flat: Tensor) -> Work:
        """Of an engine: begin to send a chunk to the one behind it; it is not to be touched until that is done."""
        return self._send(flat, (self._rank - self._num_senders + 1) % self.ring.num_engines)

    def receive(self, flat: Tensor, hop: Hop) -> Work:
        """Of an engine: begin to fill these bytes with a chunk."""
        before = self._num_senders + (self._rank - self._num_senders - 1) % self.ring.num_engines
        work: Work = self._group.recv([flat], hop.sender if hop.is_first else before, 0)
        return work

    def leave(self) -> None:
        """Give the connections up; whoever waits for them fails. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # This ends what NCCL has under way; gloo closes connections when the last reference goes.

    def _greet(self, device: torch.device) -> None:
        """A byte each way that weights will go: two GPUs connect at their first message, and each waits for the other then."""
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        chunks = range(self.ring.num_chunks)
        if self._rank < self._num_senders:
            for engine in sorted({self.ring.entry_of(self._rank, chunk) for chunk in chunks}):
                self._send(byte, engine).wait()
            return
        mine = self.hops
        for sender in sorted({hop.sender for hop in mine if hop.is_first}):
            self.receive(byte, Hop(sender, 0, is_first=True, is_last=True)).wait()

        def pass_on() -> None:
            if not all(hop.is_last for hop in mine):
                self.pass_on(byte).wait()

        def take() -> None:
            for hop in [hop for hop in mine if not hop.is_first][:1]:
                self.receive(byte, hop).wait()

        is_odd = (self._rank - self._num_senders) % 2
        for greet in (take, pass_on) if is_odd else (pass_on, take):  # A ring in which all began by sending would never begin.
            greet()

    def _send(self, flat: Tensor, engine: int) -> Work:
        work: Work = self._group.send([flat], self._num_senders + engine, 0)
        return work


class WeightReceiver:
    """Receives what a `WeightSender` sends through the same channel."""

    def __init__(self, channel: Channel, *, device: torch.device) -> None:
        self._device = device
        self._group = PushGroup(channel.group_rank, device) if channel.group_rank else None
        self._senders = channel.senders
        self._keeps = channel.delta
        self._kept: dict[tuple[int, str], Tensor] = {}
        """By sender and name."""
        self._shared: dict[str, Tensor] = {}
        """Kept open: opening hundreds of tensors takes longer than copying them."""
        self._confirmed: int | None = None
        self._base: int | None = None
        self._version, self._num_taken = 0, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._arriving: list[Work] = []
        self._passing: list[Work] = []
        """What is still coming into the buffer, and being passed on from it."""

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
        parts = ((piece, self._decoded(piece, tensors)) for piece, tensors in self._received(pieces))
        if all(entry.part is None for piece in pieces for entry in piece.entries):
            return dict(next(parts)[1])
        return _joined(parts)

    def confirm(self) -> None:
        """The whole version has been received and is in use."""
        self._confirmed = self._version

    def close(self) -> None:
        """Leave the channel; whoever waits in its group fails."""
        if self._group is not None:
            self._group.leave()
        self._arriving, self._passing = [], []  # A connection lives as long as a message on it.

    def _decoded(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self._keeps:
            return tensors
        keys = {name: (bucket.sender, name) for name in tensors}
        if bucket.base_version is None:
            self._kept |= {keys[name]: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        elif bucket.base_version != self._base or not self._kept.keys() >= set(keys.values()):
            raise PushBroken(f"changes since version {bucket.base_version} came, but version {self._base} is what is here")
        else:
            for name, coded in tensors.items():
                apply_change(coded.cpu(), base=self._kept[keys[name]])
        return {name: self._kept[key] for name, key in keys.items()}

    def _received(self, pieces: Sequence[Bucket]) -> Iterator[tuple[Bucket, Mapping[str, Tensor]]]:
        """Each piece, with its tensors, which are valid until the next bucket."""
        if self._group is not None:
            yield from ((piece, unpack(flat, piece.entries)) for piece, flat in self._from_ring(self._group, pieces))
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

    def _from_ring(self, group: PushGroup, pieces: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """The pieces as they come; while one is used it is passed on, and the next arrives."""
        while self._passing:
            self._wait(self._passing)
        ends = list(itertools.accumulate(aligned(piece.num_bytes) for piece in pieces))
        if self._buffer.numel() < ends[-1]:
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        flats = {
            self._senders.index(piece.sender): self._buffer[end - aligned(piece.num_bytes) :][: piece.num_bytes]
            for piece, end in zip(pieces, ends, strict=True)
        }
        chunks = [(hop, flats[hop.sender]) for hop in group.hops if hop.sender in flats]
        chunks = [(hop, part) for hop, flat in chunks if (part := flat[group.ring.part(flat.numel(), hop.chunk)]).numel()]
        missing = Counter(hop.sender for hop, _ in chunks)
        by_sender = {self._senders.index(piece.sender): piece for piece in pieces}
        yield from ((piece, flats[sender]) for sender, piece in by_sender.items() if not missing[sender])
        self._arriving = [group.receive(part, hop) for hop, part in chunks[:1]]
        for number, (hop, part) in enumerate(chunks):
            self._wait(self._arriving)
            if not hop.is_last:
                self._passing.append(group.pass_on(part))
            self._arriving += [group.receive(part, hop) for hop, part in chunks[number + 1 : number + 2]]
            missing[hop.sender] -= 1
            if not missing[hop.sender]:
                yield by_sender[hop.sender], flats[hop.sender]

    @staticmethod
    def _completed(works: list[Work]) -> str | None:
        """Wait for the first of them, and let go of it: a connection is open as long as somebody holds a message on it."""
        try:
            works.pop(0).wait()
        except RuntimeError as error:
            return str(error)
        return None

    def _wait(self, works: list[Work]) -> None:
        """Wait for the first of them. If it fails the group is left, so that those who wait for this engine fail too."""
        failure = self._completed(works)
        if failure is not None:
            self.close()
            raise PushBroken(f"another member of the push's process group is gone: {failure}")


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
