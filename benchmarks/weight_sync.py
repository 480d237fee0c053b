"""Weights from one process to another, by each way that there is, against one copy of the same bytes in memory.

By default a model of half a gigabyte in bf16, two processes under Ray on a CPU; the receiver copies every tensor into memory
of its own, as an engine does. `python benchmarks/weight_sync.py [--rounds 3] [--model qwen3-0.6b] [--device cuda]`. With
`--device cuda` both processes sit on one GPU, where the policy's own tensors are lent. On a CPU several `--ranks` send too,
each its share of every tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from report import arguments, report
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reroll.runtime.base import Placement, WorkerInfo, Workers
from reroll.weights.buckets import Bucket, Channel, GroupRank, TransportKind, WeightReceiver
from reroll.weights.sender import WeightSender
from reroll.weights.slices import Slice, plan_slices
from reroll_zoo.fsdp2.layout import RankLayout
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.ray.runtime import RayRuntime

CHANGED = 0.05
"""Of the values between two pushes, where changes alone travel."""


class Sizes(NamedTuple):
    """Of a transformer."""

    vocabulary: int
    hidden: int
    layers: int
    queries: int
    """Width of all query heads."""
    keys: int
    inner: int


MODELS = {
    "tiny": Sizes(2_000, 256, 2, 256, 256, 704),
    "small": Sizes(48_000, 1024, 16, 1024, 1024, 2816),
    "qwen3-0.6b": Sizes(151_936, 1024, 28, 2048, 1024, 3072),
    "qwen3-4b": Sizes(151_936, 2560, 36, 4096, 1024, 9728),
}


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Embeddings and layers."""
    hidden = sizes.hidden
    named: dict[str, tuple[int, ...]] = {"embed": (sizes.vocabulary, hidden)}
    for layer in range(sizes.layers):
        named |= {f"{layer}.q": (sizes.queries, hidden), f"{layer}.o": (hidden, sizes.queries)}
        named |= {f"{layer}.{part}": (sizes.keys, hidden) for part in "kv"}
        named |= {f"{layer}.mlp.{part}": (sizes.inner, hidden) for part in range(3)}
        named |= {f"{layer}.norm": (hidden,)}
    return named


def held_by(rank: int, model: str, *, num_ranks: int) -> dict[str, Slice]:
    """A rank's share of every tensor, as FSDP cuts them."""
    layout = RankLayout(num_ranks=num_ranks)
    return {name: layout.slice_of(rank, name, shape, dtype="bfloat16") for name, shape in shapes(MODELS[model]).items()}


class Sender:
    """A trainer's end: one rank, with its share of every tensor."""

    def __init__(self, info: WorkerInfo, model: str) -> None:
        self._device = torch.device(info.device)
        self._rank, self._in_slices = info.rank, info.world_size > 1
        self._weights = {
            name: torch.randn(part.box.shape, device=self._device, dtype=torch.bfloat16)
            for name, part in held_by(info.rank, model, num_ranks=info.world_size).items()
        }

    def open(self, channel: Channel) -> None:
        self._sender = WeightSender(channel, rank=self._rank, device=str(self._device))

    def begin(self, version: int, base_version: int | None) -> None:
        for tensor in self._weights.values():
            flat = tensor.view(-1)
            flat[torch.randint(flat.numel(), (round(CHANGED * flat.numel()),), device=self._device)] *= 1.5
        _wait(self._device)
        self._buckets: Iterator[Bucket | None] = (
            self._sender.pieces(self._weights, version=version, base_version=base_version)
            if self._in_slices
            else self._sender.buckets(self._weights.items(), version=version, base_version=base_version, lasting=True)
        )

    def next(self) -> Bucket | None:
        return next(self._buckets, None)


class Receiver:
    """An engine's end."""

    def __init__(self, info: WorkerInfo, model: str) -> None:
        self._device = torch.device(info.device)
        self._held: Mapping[str, Tensor] = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for name, shape in shapes(MODELS[model]).items()
        }

    def open(self, channel: Channel) -> None:
        self._receiver = WeightReceiver(channel, device=self._device)

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def take(self, *pieces: Bucket) -> None:
        given = self._receiver.open(*pieces)
        torch._foreach_copy_([self._held[name] for name in given], list(given.values()))
        _wait(self._device)
        if pieces[0].is_last:
            self._receiver.confirm()

    def copy_in_memory(self) -> float:
        """Seconds for one copy of all the bytes, in one thread, into memory that is there."""
        source = torch.cat([tensor.view(-1) for tensor in self._held.values()])
        target = source.clone()
        _wait(self._device)
        started_s = time.perf_counter()
        target.copy_(source)
        _wait(self._device)
        return time.perf_counter() - started_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def push(
    senders: Workers[Sender], receivers: Workers[Receiver], *, version: int, base_version: int | None
) -> tuple[float, int]:
    """Seconds, and bytes that travelled."""
    await asyncio.gather(*senders.broadcast(Sender.begin, version, base_version))
    started_s, num_bytes = time.perf_counter(), 0
    pieces = await _next_pieces(senders)
    while pieces:
        num_bytes += sum(piece.num_bytes for piece in pieces)
        pieces, _ = await asyncio.gather(_next_pieces(senders), receivers.one(0, Receiver.take, *pieces))
    return time.perf_counter() - started_s, num_bytes


async def _next_pieces(senders: Workers[Sender]) -> list[Bucket]:
    """What the ranks have of the next bucket; nothing once there is none."""
    return [piece for piece in await asyncio.gather(*senders.broadcast(Sender.next)) if piece is not None]


class Pair:
    """A sender, of one rank or several, and a receiver, and the ways between them one after the other."""

    def __init__(
        self, runtime: RayRuntime, senders: Workers[Sender], receivers: Workers[Receiver], args: argparse.Namespace
    ) -> None:
        self._host, self._senders, self._receivers = runtime.host, senders, receivers
        self._model, self._bucket_bytes = args.model, args.bucket_mb * 10**6
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)

    async def measure(self, kind: TransportKind, *, delta: bool, rounds: int) -> dict[str, object]:
        """One row of the table: pushes and plain copies, in turn."""
        with tempfile.TemporaryDirectory() as folder:
            await self._open(Channel(kind=kind, bucket_bytes=self._bucket_bytes, delta=delta, folder=Path(folder)))
            await push(self._senders, self._receivers, version=0, base_version=None)  # Memory is touched for the first time.
            pushes, copies = [], []
            for version in range(1, rounds + 1):
                base = version - 1 if delta else None
                pushes.append(await push(self._senders, self._receivers, version=version, base_version=base))
                copies.append(await self._receivers.one(0, Receiver.copy_in_memory))
            num_bytes = await self._receivers.one(0, Receiver.num_bytes)
        seconds, copy_s = statistics.median(second for second, _ in pushes), statistics.median(copies)
        way = f"{kind}, changes only" if delta else kind
        return {
            "way": f"{way}, {self._senders.size} ranks" if self._senders.size > 1 else way,
            "push_s": seconds,
            "weights_gb_per_s": num_bytes / seconds / 1e9,
            "sent_mb": pushes[-1][1] / 1e6,
            "memcpy_s": copy_s,
            "memcpys": seconds / copy_s,
        }

    async def _open(self, channel: Channel) -> None:
        num, num_senders = self._senders.size + 1, self._senders.size
        address = f"{self._host}:{self._store.port}"
        ends = [channel] * num
        if num_senders > 1:
            held = [held_by(rank, self._model, num_ranks=num_senders) for rank in range(num_senders)]
            plan = plan_slices(held, bucket_bytes=channel.bucket_bytes)
            ends = [replace(channel, senders=plan.senders, slices=plan.of(rank)) for rank in range(num)]
        if channel.kind == "broadcast":
            ranks = [GroupRank(address, "weights", rank, num, num_senders=num_senders) for rank in range(num)]
            ends = [replace(end, group_rank=rank) for end, rank in zip(ends, ranks, strict=True)]
        await asyncio.gather(
            *(self._senders.one(rank, Sender.open, end) for rank, end in enumerate(ends[:-1])),
            self._receivers.one(0, Receiver.open, ends[-1]),
        )


WAYS: dict[str, list[tuple[TransportKind, bool]]] = {
    "cpu": [("ipc", False), ("broadcast", False), ("store", False), ("disk", False), ("store", True), ("disk", True)],
    "cuda": [("ipc", False), ("store", False)],  # No broadcast: a process group has one process per GPU.
}

SLICED_WAYS: dict[str, list[tuple[TransportKind, bool]]] = {"cpu": [("broadcast", False), ("store", False)], "cuda": []}
"""From several ranks at once."""


async def compare(args: argparse.Namespace) -> list[dict[str, object]]:
    device = "cpu" if args.device == "cpu" else "0"
    async with RayRuntime(RayRuntimeConfig(kind="ray")) as runtime:
        senders = await runtime.spawn(Sender, Placement("sender", (device,)), args.model)
        receivers = await runtime.spawn(Receiver, Placement("receiver", (device,)), args.model)
        pair = Pair(runtime, senders, receivers, args)
        rows = [await pair.measure(kind, delta=delta, rounds=args.rounds) for kind, delta in WAYS[args.device]]
        if SLICED_WAYS[args.device]:
            ranks = await runtime.spawn(Sender, Placement("ranks", (device,) * args.ranks), args.model)
            pair = Pair(runtime, ranks, receivers, args)
            rows += [await pair.measure(kind, delta=delta, rounds=args.rounds) for kind, delta in SLICED_WAYS[args.device]]
        return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="that send at once, where several do")
    parser.add_argument("--bucket-mb", type=int, default=64)
    args = parser.parse_args()
    rows = asyncio.run(compare(args))
    title = f"Weights of {args.model} from process to process on {args.device}, against one copy in memory"
    note = f"median of {args.rounds}; {CHANGED:.0%} of the values change between pushes; buckets of {args.bucket_mb} MB"
    name = "weight_sync" if args.device == "cpu" else f"weight_sync_{args.device}_{args.model}"
    report(name, rows, title=title, note=note, save=args.save)


if __name__ == "__main__":
    main()
