"""The trainer's end of a push: fills bucket after bucket, with gathered weights or a rank's own slices, and sends each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from reroll.config.registry import load_entry
from reroll.weights.buckets import (
    Bucket,
    Channel,
    Entry,
    IpcHandle,
    IpcTensors,
    Mapped,
    Payload,
    SameIpcTensors,
    Stored,
    aligned,
    put,
)
from reroll.weights.slices import Slice


class WeightSender:
    """Sends weights through a channel, on one rank: what is gathered (`buckets`), or this rank's own part (`pieces`).

    Ranks that are no senders take part in the gathers, and hold nothing.
    """

    def __init__(self, channel: Channel, *, rank: int, device: str) -> None:
        self._channel, self._rank = channel, rank
        self._transport = make_transport(channel, device=torch.device(device)) if rank in channel.senders else None
        self._changed: Callable[..., Tensor] | None = load_entry("reroll.changes", "sender")() if channel.delta else None
        self._sent_version: int | None = None

    def buckets(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, base_version: int | None, lasting: bool = False
    ) -> Iterator[Bucket | None]:
        """The buckets of one push, each sent when it is asked for; None on a rank that only takes part in the gathers.

        All ranks are asked equally often, so that their collectives match. With a `base_version`, buckets hold what
        changed since, if that is what was sent last. `lasting` tensors stay in the memory where they are as long as the
        channel: a receiver on the same GPU can be shown them instead of a copy.
        """
        base_version = self._begin(version, base_version=base_version)
        made: Iterator[Bucket | None]
        if lasting and isinstance(self._transport, GpuTransport) and not self._channel.delta:
            made = self._shared(self._transport, dict(tensors), version=version)
        else:
            made = self._buckets(tensors, version=version, base_version=base_version)
        if self._channel.kind == "disk":  # Nobody reads a version before all of it is there.
            made = iter([*made])
            self._finish(version)
            yield from made
            return
        yield from made
        self._finish(version)

    def pieces(self, parts: Mapping[str, Tensor], *, version: int, base_version: int | None) -> Iterator[Bucket | None]:
        """What this rank has of each bucket of one push, by the channel's plan; `parts` is its part of every weight.

        No other rank takes part. None on a rank that sends nothing.
        """
        base_version = self._begin(version, base_version=base_version)
        planned = self._channel.slices or ((),)
        for index, slices in enumerate(planned):
            bucket = _OpenBucket(version, index=index, base_version=base_version)
            for part in slices:
                self._fill(bucket, part.name, parts[part.name].detach().to(getattr(torch, part.dtype)), part=part)
            yield self._shipped(bucket, is_last=index + 1 == len(planned))
        self._finish(version)

    def close(self) -> None:
        """Leave the channel."""
        if self._transport is not None:
            self._transport.close()

    def _begin(self, version: int, *, base_version: int | None) -> int | None:
        """Begin a push; returns the version that changes can be sent since."""
        if base_version != self._sent_version:
            base_version = None
        self._sent_version = None  # A push that broke off is no base for changes.
        if self._transport is not None:
            self._transport.begin(version)
        return base_version

    def _finish(self, version: int) -> None:
        if self._transport is not None:
            self._transport.finish()
        self._sent_version = version

    def _buckets(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, base_version: int | None
    ) -> Iterator[Bucket | None]:
        bucket = _OpenBucket(version, index=0, base_version=base_version)
        for name, tensor in tensors:
            if bucket.num_gathered and bucket.num_gathered + tensor.nbytes > self._channel.bucket_bytes:
                yield self._shipped(bucket, is_last=False)
                bucket = _OpenBucket(version, index=bucket.index + 1, base_version=base_version)
            bucket.num_gathered += tensor.nbytes
            self._fill(bucket, name, tensor.detach())
        yield self._shipped(bucket, is_last=True)

    def _shared(self, transport: GpuTransport, tensors: dict[str, Tensor], *, version: int) -> Iterator[Bucket | None]:
        if not all(tensor.is_cuda for tensor in tensors.values()):  # The policy has left the GPU.
            yield from self._buckets(tensors.items(), version=version, base_version=None)
            return
        started_s = time.perf_counter()
        payload = transport.share([tensor.detach() for tensor in tensors.values()])
        entries = () if isinstance(payload, SameIpcTensors) else tuple(_shared_entries(tensors))
        yield Bucket(
            sender=self._rank,
            version=version,
            index=0,
            is_last=True,
            base_version=None,
            entries=entries,
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            payload=payload,
            gather_s=time.perf_counter() - started_s,
        )

    def _fill(self, bucket: _OpenBucket, name: str, tensor: Tensor, *, part: Slice | None = None) -> None:
        if self._transport is None:
            return
        if self._changed is not None:
            tensor = self._changed(name, tensor, as_change=bucket.base_version is not None)
        entry = bucket.add(name, tensor, part=part)
        put(self._transport.buffer(bucket.num_filled), entry, tensor)

    def _shipped(self, bucket: _OpenBucket, *, is_last: bool) -> Bucket | None:
        if self._transport is None:
            return None
        gather_s = time.perf_counter() - bucket.started_s
        return Bucket(
            sender=self._rank,
            version=bucket.version,
            index=bucket.index,
            is_last=is_last,
            base_version=bucket.base_version,
            entries=tuple(bucket.entries),
            num_bytes=bucket.num_filled,
            payload=self._transport.send(bucket.num_filled, bucket.entries),
            gather_s=gather_s,
        )


def _shared_entries(tensors: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Entries without an offset: each tensor is opened where it is."""
    return (Entry(name, tensor.dtype, tuple(tensor.shape), 0) for name, tensor in tensors.items())


@dataclass(slots=True)
class _OpenBucket:
    """The bucket that is being filled."""

    version: int
    index: int
    base_version: int | None
    entries: list[Entry] = field(default_factory=list)
    num_gathered: int = 0
    """Bytes of its tensors. Every rank cuts buckets by it, also those that send nothing."""
    num_filled: int = 0
    """Bytes to send."""
    started_s: float = field(default_factory=time.perf_counter)

    def add(self, name: str, tensor: Tensor, *, part: Slice | None = None) -> Entry:
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), aligned(self.num_filled), part)
        self.entries.append(entry)
        self.num_filled = entry.offset + tensor.nbytes
        return entry


class Transport:
    """Two buffers that alternate: one is filled while the other is sent. This base class hands over the bytes themselves."""

    device = torch.device("cpu")

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._turn = 0

    def begin(self, version: int) -> None:
        """Begin a push; what an earlier one left unfinished is void."""

    def buffer(self, num_bytes: int) -> Tensor:
        """[at least num_bytes] the buffer to fill next, with what was filled in so far."""
        buffer = self._buffers[self._turn]
        if buffer.numel() < num_bytes:
            # By doubling: small weights take little memory, and large ones are not copied often.
            self._buffers[self._turn] = self._larger(buffer, max(num_bytes, min(2 * buffer.numel(), self._bucket_bytes)))
        return self._buffers[self._turn]

    def send(self, num_bytes: int, entries: Sequence[Entry]) -> Payload:
        """Send what was filled in. The bucket after the next one reuses its buffer: by then all receivers must have it."""
        flat = self._buffers[self._turn][:num_bytes]
        payload = self._payload(flat, entries)
        self._turn = 1 - self._turn
        return payload

    def finish(self) -> None:
        """The last bucket of a push was sent."""

    def close(self) -> None:
        """Free what outlives the object."""

    def _larger(self, buffer: Tensor, num_bytes: int) -> Tensor:
        larger = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        larger[: buffer.numel()] = buffer
        return larger

    def _payload(self, flat: Tensor, entries: Sequence[Entry]) -> Payload:
        return Stored(flat.numpy())


class MappedTransport(Transport):
    """Anonymous shared-memory files that other processes of the host map. They vanish with the last that has them open."""

    def __init__(self, *, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self._files = [os.memfd_create("reroll-weights") for _ in range(2)]

    def close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _larger(self, buffer: Tensor, num_bytes: int) -> Tensor:
        os.ftruncate(self._files[self._turn], num_bytes)
        return torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[self._turn]}"

    def _payload(self, flat: Tensor, entries: Sequence[Entry]) -> Payload:
        return Mapped(self._path)


class GpuTransport(Transport):
    """GPU memory, which other processes on the same GPU open by CUDA IPC."""

    def __init__(self, *, bucket_bytes: int, device: torch.device) -> None:
        self.device = device
        super().__init__(bucket_bytes=bucket_bytes)
        self._shared: list[int] = []
        """Addresses of the tensors that were shared last."""

    def share(self, tensors: Sequence[Tensor]) -> Payload:
        """Share these tensors themselves instead of a copy. They must keep their memory: the receiver keeps it open."""
        torch.cuda.synchronize(self.device)  # Other processes' streams do not wait for ours.
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses == self._shared:
            return SameIpcTensors()
        self._shared = addresses
        return IpcTensors(tuple(IpcHandle(*reduce_tensor(tensor)) for tensor in tensors))  # type: ignore[no-untyped-call]

    def _payload(self, flat: Tensor, entries: Sequence[Entry]) -> Payload:
        torch.cuda.synchronize(self.device)
        return IpcHandle(*reduce_tensor(flat))  # type: ignore[no-untyped-call]


def make_transport(channel: Channel, *, device: torch.device) -> Transport:
    """The transport of a channel; `device` is where it should put the bytes, if it can choose."""
    size = channel.bucket_bytes
    if channel.slices is not None:  # It is known what this rank has of each bucket.
        size = max(sum(aligned(part.num_bytes) for part in piece) for piece in channel.slices)
    match channel.kind:
        case "ipc":
            if device.type == "cuda":
                return GpuTransport(bucket_bytes=size, device=device)
            return MappedTransport(bucket_bytes=size)
        case "broadcast" | "disk":
            transport: Transport = load_entry("reroll.transports", channel.kind)(channel, bucket_bytes=size, device=device)
            return transport
        case "store":
            return Transport(bucket_bytes=size)
