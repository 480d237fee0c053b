"""Weights from one process to another, by each way that there is, against one copy of the same bytes in memory.

By default a model of half a gigabyte in bf16, two processes under Ray on a CPU; the receiver copies every tensor into memory
of its own, as an engine does. `python benchmarks/weight_sync.py [--rounds 3] [--model qwen3-0.6b] [--device cuda]`. With
`--device cuda` both processes sit on one GPU, where the policy's own tensors are lent.
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


class Sender:
    """A trainer's end."""

    def __init__(self, info: WorkerInfo, model: str) -> None:
        self._device = torch.device(info.device)
        self._weights = {
            name: torch.randn(shape, device=self._device, dtype=torch.bfloat16) for name, shape in shapes(MODELS[model]).items()
        }

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    def open(self, channel: Channel) -> None:
        self._sender = WeightSender(channel, rank=0, device=str(self._device))

    def begin(self, version: int, base_version: int | None) -> None:
        for tensor in self._weights.values():
            flat = tensor.view(-1)
            flat[torch.randint(flat.numel(), (round(CHANGED * flat.numel()),), device=self._device)] *= 1.5
        _wait(self._device)
        self._buckets: Iterator[Bucket | None] = self._sender.buckets(
            self._weights.items(), version=version, base_version=base_version, lasting=True
        )

    def next(self) -> Bucket | None:
        return next(self._buckets, None)

    def copy_in_memory(self) -> float:
        """Seconds for one copy of all the bytes, in one thread, into memory that is there."""
        source = torch.cat([tensor.view(-1) for tensor in self._weights.values()])
        target = source.clone()
        _wait(self._device)
        started_s = time.perf_counter()
        target.copy_(source)
        _wait(self._device)
        return time.perf_counter() - started_s


class Receiver:
    """An engine's end."""

    def __init__(self, info: WorkerInfo, model: str) -> None:
        self._device = torch.device(info.device)
        self._held: Mapping[str, Tensor] = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for name, shape in shapes(MODELS[model]).items()
        }

    def open(self, channel: Channel) -> None:
        self._receiver = WeightReceiver(channel, device=self._device)

    def take(self, bucket: Bucket) -> None:
        given = self._receiver.open(bucket)
        torch._foreach_copy_([self._held[name] for name in given], list(given.values()))
        _wait(self._device)
        if bucket.is_last:
            self._receiver.confirm()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def push(
    senders: Workers[Sender], receivers: Workers[Receiver], *, version: int, base_version: int | None
) -> tuple[float, int]:
    """Seconds, and bytes that travelled."""
    await senders.one(0, Sender.begin, version, base_version)
    started_s, num_bytes = time.perf_counter(), 0
    bucket = await senders.one(0, Sender.next)
    while bucket is not None:
        num_bytes += bucket.num_bytes
        bucket, _ = await asyncio.gather(senders.one(0, Sender.next), receivers.one(0, Receiver.take, bucket))
    return time.perf_counter() - started_s, num_bytes


class Pair:
    """A sender and a receiver, and the ways between them one after the other."""

    def __init__(self, runtime: RayRuntime, senders: Workers[Sender], receivers: Workers[Receiver], *, bucket_mb: int) -> None:
        self._host, self._senders, self._receivers, self._bucket_bytes = runtime.host, senders, receivers, bucket_mb * 10**6
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
                copies.append(await self._senders.one(0, Sender.copy_in_memory))
            num_bytes = await self._senders.one(0, Sender.num_bytes)
        seconds, copy_s = statistics.median(second for second, _ in pushes), statistics.median(copies)
        return {
            "way": f"{kind}, changes only" if delta else kind,
            "push_s": seconds,
            "weights_gb_per_s": num_bytes / seconds / 1e9,
            "sent_mb": pushes[-1][1] / 1e6,
            "memcpy_s": copy_s,
            "memcpys": seconds / copy_s,
        }

    async def _open(self, channel: Channel) -> None:
        address, in_group = f"{self._host}:{self._store.port}", channel.kind == "broadcast"
        group_ranks = [GroupRank(address, "weights", rank, 2) if in_group else None for rank in (0, 1)]
        await asyncio.gather(
            self._senders.one(0, Sender.open, replace(channel, group_rank=group_ranks[0])),
            self._receivers.one(0, Receiver.open, replace(channel, group_rank=group_ranks[1])),
        )


WAYS: dict[str, list[tuple[TransportKind, bool]]] = {
    "cpu": [("ipc", False), ("broadcast", False), ("store", False), ("disk", False), ("store", True), ("disk", True)],
    "cuda": [("ipc", False), ("store", False)],  # No broadcast: a process group has one process per GPU.
}


async def compare(args: argparse.Namespace) -> list[dict[str, object]]:
    device = "cpu" if args.device == "cpu" else "0"
    async with RayRuntime(RayRuntimeConfig(kind="ray")) as runtime:
        senders = await runtime.spawn(Sender, Placement("sender", (device,)), args.model)
        receivers = await runtime.spawn(Receiver, Placement("receiver", (device,)), args.model)
        pair = Pair(runtime, senders, receivers, bucket_mb=args.bucket_mb)
        return [await pair.measure(kind, delta=delta, rounds=args.rounds) for kind, delta in WAYS[args.device]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--bucket-mb", type=int, default=64)
    args = parser.parse_args()
    rows = asyncio.run(compare(args))
    title = f"Weights of {args.model} from process to process on {args.device}, against one copy in memory"
    note = f"median of {args.rounds}; {CHANGED:.0%} of the values change between pushes; buckets of {args.bucket_mb} MB"
    name = "weight_sync" if args.device == "cpu" else f"weight_sync_{args.device}_{args.model}"
    report(name, rows, title=title, note=note, save=args.save)


if __name__ == "__main__":
    main()
