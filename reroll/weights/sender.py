"""The trainer's end of a push: gathers weights bucket by bucket, and sends each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reroll.weights.bucket import Bucket, Channel, Entry, SameIpcTensors, aligned, put
from reroll.weights.delta import encode
from reroll.weights.transports import GpuTransport, make_transport


class WeightSender:
    """Sends weights through a channel, on one rank. Ranks that are no senders take part in the gathers, and hold nothing."""

    def __init__(self, channel: Channel, *, rank: int, device: str) -> None:
        self._channel = channel
        self._transport = make_transport(channel, device=torch.device(device)) if rank in channel.senders else None
        self._sent: dict[str, Tensor] = {}
        self._sent_version: int | None = None

    def buckets(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, base_version: int | None, lasting: bool = False
    ) -> Iterator[Bucket | None]:
        """The buckets of one push, each sent when it is asked for; None on a rank that only takes part in the gathers.

        All ranks are asked equally often, so that their collectives match. With a `base_version`, buckets hold what
        changed since, if that is what was sent last. `lasting` tensors stay in the memory where they are as long as the
        channel: a receiver on the same GPU can be shown them instead of a copy.
        """
        if base_version != self._sent_version:
            base_version = None
        self._sent_version = None  # A push that broke off is no base for changes.
        if self._transport is not None:
            self._transport.begin(version)
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

    def close(self) -> None:
        """Leave the channel."""
        if self._transport is not None:
            self._transport.close()

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
            version=version,
            index=0,
            is_last=True,
            base_version=None,
            entries=entries,
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            payload=payload,
            gather_s=time.perf_counter() - started_s,
        )

    def _fill(self, bucket: _OpenBucket, name: str, tensor: Tensor) -> None:
        if self._transport is None:
            return
        if self._channel.delta:
            tensor = self._coded(name, tensor, as_change=bucket.base_version is not None)
        entry = bucket.add(name, tensor)
        put(self._transport.buffer(bucket.num_filled), entry, tensor)

    def _coded(self, name: str, tensor: Tensor, *, as_change: bool) -> Tensor:
        """The tensor, or how it changed since it was last sent; kept for the next time."""
        new = tensor.to("cpu", copy=True).contiguous()
        base, self._sent[name] = self._sent.get(name), new
        return encode(new, base=base) if as_change and base is not None else new

    def _shipped(self, bucket: _OpenBucket, *, is_last: bool) -> Bucket | None:
        if self._transport is None:
            return None
        gather_s = time.perf_counter() - bucket.started_s
        return Bucket(
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

    def add(self, name: str, tensor: Tensor) -> Entry:
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), aligned(self.num_filled))
        self.entries.append(entry)
        self.num_filled = entry.offset + tensor.nbytes
        return entry
