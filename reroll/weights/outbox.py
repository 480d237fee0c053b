"""The trainer's end: gathers weights bucket by bucket and sends each off."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reroll.weights.carriers import GpuCarrier, make_carrier
from reroll.weights.delta import encode
from reroll.weights.parcel import Channel, Entry, LentBefore, Parcel, aligned, put


class Outbox:
    """One rank's part in sending weights through a channel. Ranks that do not send help to gather, and hold nothing."""

    def __init__(self, channel: Channel, *, rank: int, device: str) -> None:
        self._channel = channel
        self._carrier = make_carrier(channel, device=torch.device(device)) if rank in channel.senders else None
        self._sent: dict[str, Tensor] = {}
        self._sent_version: int | None = None

    def parcels(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, base_version: int | None, lasting: bool = False
    ) -> Iterator[Parcel | None]:
        """The parcels of one push, each shipped when it is asked for; None on a rank that only helps.

        All ranks are asked equally often, and meet in the same gathers each time. With a `base_version`, parcels hold what
        changed since, if that is what was sent last. `lasting` tensors stay in the memory where they are as long as the
        channel: a receiver on the same GPU can be shown them instead of a copy.
        """
        if base_version != self._sent_version:
            base_version = None
        self._sent_version = None  # Half sent is nothing to build on.
        if self._carrier is not None:
            self._carrier.begin(version)
        made: Iterator[Parcel | None]
        if lasting and isinstance(self._carrier, GpuCarrier) and not self._channel.delta:
            made = self._lent(self._carrier, dict(tensors), version=version)
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
        if self._carrier is not None:
            self._carrier.close()

    def _finish(self, version: int) -> None:
        if self._carrier is not None:
            self._carrier.finish()
        self._sent_version = version

    def _buckets(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, base_version: int | None
    ) -> Iterator[Parcel | None]:
        bucket = _Bucket(version, index=0, base_version=base_version)
        for name, tensor in tensors:
            if bucket.num_gathered and bucket.num_gathered + tensor.nbytes > self._channel.bucket_bytes:
                yield self._shipped(bucket, is_last=False)
                bucket = _Bucket(version, index=bucket.index + 1, base_version=base_version)
            bucket.num_gathered += tensor.nbytes
            self._fill(bucket, name, tensor.detach())
        yield self._shipped(bucket, is_last=True)

    def _lent(self, carrier: GpuCarrier, tensors: dict[str, Tensor], *, version: int) -> Iterator[Parcel | None]:
        if not all(tensor.is_cuda for tensor in tensors.values()):  # The policy has left the GPU.
            yield from self._buckets(tensors.items(), version=version, base_version=None)
            return
        started_s = time.perf_counter()
        payload = carrier.lend([tensor.detach() for tensor in tensors.values()])
        entries = () if isinstance(payload, LentBefore) else tuple(_lent_entries(tensors))
        yield Parcel(
            version=version,
            index=0,
            is_last=True,
            base_version=None,
            entries=entries,
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            payload=payload,
            gather_s=time.perf_counter() - started_s,
        )

    def _fill(self, bucket: _Bucket, name: str, tensor: Tensor) -> None:
        if self._carrier is None:
            return
        if self._channel.delta:
            tensor = self._coded(name, tensor, as_change=bucket.base_version is not None)
        entry = bucket.add(name, tensor)
        put(self._carrier.room(bucket.num_filled), entry, tensor)

    def _coded(self, name: str, tensor: Tensor, *, as_change: bool) -> Tensor:
        """The tensor, or how it changed since it was last sent; kept for the next time."""
        new = tensor.to("cpu", copy=True).contiguous()
        base, self._sent[name] = self._sent.get(name), new
        return encode(new, base=base) if as_change and base is not None else new

    def _shipped(self, bucket: _Bucket, *, is_last: bool) -> Parcel | None:
        if self._carrier is None:
            return None
        gather_s = time.perf_counter() - bucket.started_s
        return Parcel(
            version=bucket.version,
            index=bucket.index,
            is_last=is_last,
            base_version=bucket.base_version,
            entries=tuple(bucket.entries),
            num_bytes=bucket.num_filled,
            payload=self._carrier.ship(bucket.num_filled, bucket.entries),
            gather_s=gather_s,
        )


def _lent_entries(tensors: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Each is shown where it lies: there is no offset."""
    return (Entry(name, tensor.dtype, tuple(tensor.shape), 0) for name, tensor in tensors.items())


@dataclass(slots=True)
class _Bucket:
    """What the next parcel holds."""

    version: int
    index: int
    base_version: int | None
    entries: list[Entry] = field(default_factory=list)
    num_gathered: int = 0
    """Bytes of its tensors. All ranks cut buckets by it, also those that fill none."""
    num_filled: int = 0
    """Bytes that are sent."""
    started_s: float = field(default_factory=time.perf_counter)

    def add(self, name: str, tensor: Tensor) -> Entry:
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), aligned(self.num_filled))
        self.entries.append(entry)
        self.num_filled = entry.offset + tensor.nbytes
        return entry
