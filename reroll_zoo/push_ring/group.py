"""Buckets in a process group: each sender gives a chunk to one engine, and the engines pass it round their ring."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from reroll.weights.buckets import Bucket, Channel, Entry, GroupRank, InGroup, Payload, PushBroken, aligned
from reroll.weights.sender import Transport
from reroll_zoo.push_ring.order import Hop, Ring

GROUP_TIMEOUT = timedelta(minutes=2)
"""For all members to come, and for one bucket to arrive. A member that died is noticed sooner: its connections close."""


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


class RingTransport(Transport):
    """Each bucket goes to the engines of a ring in chunks, while the next bucket is filled."""

    def __init__(self, channel: Channel, *, bucket_bytes: int, device: torch.device) -> None:
        self.device = device
        super().__init__(bucket_bytes=bucket_bytes)
        assert channel.group_rank is not None
        self._group = PushGroup(channel.group_rank, device)
        self._in_flight: list[Work] = []

    def finish(self) -> None:
        self._wait()

    def close(self) -> None:
        self._group.leave()

    def _payload(self, flat: Tensor, entries: Sequence[Entry]) -> Payload:
        # Where ranks gather together, bucket by bucket, an error at the end of one leaves none of them waiting.
        works = self._group.send(flat)
        self._wait()
        self._in_flight = works
        return InGroup()

    def _wait(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).wait()


class RingReceiver:
    """The engine's end of a push by a ring."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        assert channel.group_rank is not None
        self._device, self._senders = device, channel.senders
        self._group = PushGroup(channel.group_rank, device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._arriving: list[Work] = []
        self._passing: list[Work] = []
        """What is still coming into the buffer, and being passed on from it."""

    def receive(self, pieces: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """The pieces as they come; while one is used it is passed on, and the next arrives."""
        group = self._group
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

    def close(self) -> None:
        """Leave the group; whoever waits for this engine there fails. Safe to call twice."""
        self._group.leave()
        self._arriving, self._passing = [], []  # A connection lives as long as a message on it.

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
