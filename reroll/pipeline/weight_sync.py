"""Publishes a policy's weights to its engines under a version number."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reroll.config.weights import WeightsConfig, WeightsKind
from reroll.errors import RerollError, WeightsError, WorkerDied
from reroll.infer.cluster import InferCluster
from reroll.observe.metrics import Last, Stats
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll.weights.buckets import Bucket, Channel, GroupRank, ProcessLocation, PushBroken, TransportKind
from reroll.weights.slices import SlicePlan, plan_slices

T = TypeVar("T")
U = TypeVar("U")

CPU = "cpu"

log = logging.getLogger(__name__)


class WeightSync:
    """Pushes weights from the policy to the engines.

    Workers of one process pass tensors by reference, so the engine adopts the trainer's own parameters and a push copies
    nothing. That is only sound while generation and training take turns: with a staleness budget the engine goes on
    generating during the next update, and gets a `snapshot`, copied into its own tensors. Between processes weights travel
    in buckets: the trainer fills the next one while the engines take the last. Where every rank reaches every engine each
    sends what it holds, by a plan that is made once (`plan_slices`); else those that do gather the weights first.

    Versions are whole: from its first bucket to its last an engine does not step, and one whose push broke off does not
    step until another has gone through. A push that fails is repeated in full; an engine that dies is left out.

    Only what is trained travels: of a policy with an adapter, the adapter. Where trainer and engine share memory, the
    first push also hands over the frozen weights, by reference, so that the process does not go on holding them twice.
    """

    def __init__(
        self,
        policy: TrainCluster,
        engine: InferCluster,
        config: WeightsConfig,
        *,
        share_memory: bool,
        snapshot: bool,
        host: str = "127.0.0.1",
        folder: Path = Path("weights"),
    ) -> None:
        """`host` is this machine as workers reach it; `folder` is where kind disk writes, unless the config says."""
        self._policy, self._engine, self._config = policy, engine, config
        self._shares_memory, self._snapshot, self._owes_frozen = share_memory, snapshot, share_memory
        self._host, self._folder = host, config.folder or folder
        self._store: TCPStore | None = None
        self._num_channels = 0
        self._members: tuple[list[ProcessLocation], dict[int, ProcessLocation]] | None = None
        self._routes: dict[int, tuple[int, ...]] = {}
        """The ranks that each engine has its buckets from."""
        self._confirmed: int | None = None

    async def push(self, *, version: int) -> Stats:
        """Every token the engine writes from here on is written by these weights and tagged with this version.

        Raises WeightsError if that cannot be had, and WorkerDied if the trainer or the last engine is gone.
        """
        started_s = time.perf_counter()
        stats = await (self._share(version) if self._shares_memory else self._send(version))
        return stats + Stats({"time/push_s": Last(time.perf_counter() - started_s)})

    async def _share(self, version: int) -> Stats:
        weights = await self._policy.weights()
        if self._owes_frozen:
            frozen = await self._policy.weights(frozen=True)
            await self._engine.load_weights({**frozen, **weights}, version=version)
        if self._snapshot or not self._owes_frozen:
            await self._engine.load_weights(weights, version=version, adopt=not self._snapshot)
        self._owes_frozen = False
        return Stats({"push/bytes": Last(float(sum(tensor.nbytes for tensor in weights.values())))})

    async def _send(self, version: int) -> Stats:
        for num_tries in range(1, self._config.retries + 2):
            try:
                return await self._try(version) + Stats({"push/tries": Last(float(num_tries))})
            except (WorkerDied, WeightsError):
                raise  # Another try would end the same.
            except RerollError as error:
                # Whatever is left of the channel is not to be trusted: a new one, and all weights anew.
                self._members = self._confirmed = None
                log.warning("push %d of version %d broke off: %s", num_tries, version, error)
                failure = error
        raise WeightsError(
            f"version {version} of the weights did not reach the engines in {self._config.retries + 1} tries, and they write "
            f"no token until it does. Mend what is said below and go on from the last checkpoint with --resume.\n{failure}"
        ) from failure

    async def _try(self, version: int) -> Stats:
        await self._open_channel()
        base, self._confirmed = self._confirmed, None
        buckets = await self._policy.broadcast(
            TrainWorker.begin_push, version=version, base_version=base if self._config.delta else None
        )
        num_bytes, gather_s, is_whole = 0, 0.0, False
        while pieces := self._pieces(buckets, next(iter(self._routes.values()))):
            num_bytes += sum(piece.num_bytes for piece in pieces)
            gather_s, is_whole = gather_s + max(piece.gather_s for piece in pieces), pieces[0].is_last
            buckets = await self._deliver(buckets)
        if not is_whole:
            raise PushBroken(f"the buckets of version {version} ended before the last")
        self._confirmed = version
        return Stats({"push/bytes": Last(float(num_bytes)), "time/gather_s": Last(gather_s)})

    async def _deliver(self, buckets: list[Bucket | None]) -> list[Bucket | None]:
        """Hand these buckets to the engines while the trainers fill the next ones."""
        pieces = {senders: self._pieces(buckets, senders) for senders in set(self._routes.values())}
        routed = {engine: pieces[senders] for engine, senders in self._routes.items()}
        following, _ = await _both(self._policy.broadcast(TrainWorker.next_bucket), self._engine.take_weights(routed))
        return following

    @staticmethod
    def _pieces(buckets: Sequence[Bucket | None], senders: Iterable[int]) -> list[Bucket]:
        """What these ranks have of a bucket, without those that have nothing of it; nothing if there is no bucket."""
        pieces = [piece for sender in senders if (piece := buckets[sender]) is not None]
        return [piece for piece in pieces if piece.entries] or pieces[:1]

    async def _open_channel(self) -> None:
        """Open a channel between the trainers and the engines that are alive. It is kept until one comes, goes or fails."""
        trainers, engines = await _both(self._policy.broadcast(TrainWorker.location), self._engine.locations())
        if (trainers, engines) == self._members:
            return
        self._confirmed = None
        kind = choose_transport(self._config.kind, trainers, engines)
        bucket_bytes = int(self._config.bucket_mb * 1e6)
        reachable = all_reach_all(kind, trainers, engines)
        plan = await self._plan_slices(bucket_bytes=bucket_bytes) if reachable else None
        if plan is not None:
            self._routes = dict.fromkeys(engines, plan.senders)
        else:
            beside = {rank: colocated_rank(trainers, place) or 0 if kind == "ipc" else 0 for rank, place in engines.items()}
            self._routes = {engine: (trainer,) for engine, trainer in beside.items()}
        senders = tuple(sorted({sender for route in self._routes.values() for sender in route}))
        channel = Channel(
            kind=kind,
            bucket_bytes=bucket_bytes,
            delta=self._config.delta,
            folder=self._folder.absolute() if kind == "disk" else None,
            senders=senders,
        )
        ring = sorted(engines, key=lambda engine: (engines[engine].host, engine))  # Neighbours are on one machine.
        groups = self._group_ranks(len(senders), len(ring)) if kind == "broadcast" else []
        sending = dict(zip(senders, groups, strict=False))
        channels = [
            replace(channel, group_rank=sending.get(rank), slices=None if plan is None else plan.of(rank))
            for rank in range(len(trainers))
        ]
        await _both(
            self._policy.scatter(TrainWorker.open_sender, channels),
            self._engine.open_receiver(channel, group_ranks=dict(zip(ring, groups[len(senders) :], strict=bool(groups)))),
        )
        self._members = trainers, engines
        how = "of the policy" if plan is None else "of the policy, each its own part,"
        log.info("weights travel by %s from rank %s %s to %d engines", kind, channel.senders, how, len(engines))

    async def _plan_slices(self, *, bucket_bytes: int) -> SlicePlan | None:
        """Who sends which part of the weights; None if the policy does not say which it holds."""
        held = await self._policy.broadcast(TrainWorker.slices)
        known = [parts for parts in held if parts is not None]
        return plan_slices(known, bucket_bytes=bucket_bytes) if len(known) == len(held) else None

    def _group_ranks(self, num_senders: int, num_engines: int) -> list[GroupRank]:
        """The ranks of a new process group: its senders, then its engines."""
        if self._store is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        address, self._num_channels = f"{self._host}:{self._store.port}", self._num_channels + 1
        size, name = num_senders + num_engines, f"weights/{self._num_channels}"
        return [GroupRank(address, name, rank, size, num_senders) for rank in range(size)]


async def _both(ours: Coroutine[Any, Any, T], theirs: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Both results, once both calls are over. If both fail, a worker's death is raised: it causes the other errors."""
    tasks = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
    await asyncio.wait(tasks)
    failures = [failure for task in tasks if (failure := task.exception())]
    if failures:
        raise min(failures, key=lambda failure: not isinstance(failure, WorkerDied))
    return tasks[0].result(), tasks[1].result()


def choose_transport(
    wanted: WeightsKind, trainers: Sequence[ProcessLocation], engines: Mapping[int, ProcessLocation]
) -> TransportKind:
    """The transport that was asked for, if it can work; `auto` is the fastest that can.

    Shared memory where every engine has a trainer on its device, a collective where none has, else the runtime's store,
    which works everywhere. Raises WeightsError, with the fix, for what cannot work.
    """
    beside = all(colocated_rank(trainers, engine) is not None for engine in engines.values())
    on_gpus = CPU not in {place.device for place in (trainers[0], *engines.values())}
    on_cpus = {place.device for place in (trainers[0], *engines.values())} == {CPU}
    apart = trainers[0].device not in {engine.device for engine in engines.values()}
    apart = apart and len({engine.device for engine in engines.values()}) == len(engines)
    collective = on_cpus or (on_gpus and apart)
    if wanted == "auto":
        return "ipc" if beside else "broadcast" if on_gpus and collective else "store"
    if wanted == "ipc" and not beside:
        raise WeightsError(
            "weights.kind ipc: an engine shares neither its GPU nor, on a CPU, its machine with the policy, and so cannot "
            "see its memory: set weights.kind to auto"
        )
    if wanted == "broadcast" and not collective:
        raise WeightsError(
            "weights.kind broadcast: a process group has one process per GPU, and either only GPUs or none, but policy and "
            "engines share a GPU or mix: set weights.kind to auto"
        )
    assert wanted != "shared"  # Refused by the checks: workers of other processes share nothing.
    return wanted


def all_reach_all(kind: TransportKind, trainers: Sequence[ProcessLocation], engines: Mapping[int, ProcessLocation]) -> bool:
    """Whether every rank of the policy can send to every engine by this transport, so that none has to gather."""
    places = [*trainers, *engines.values()]
    match kind:
        case "store":
            return True
        case "ipc":
            return all(place.device == CPU and place.host == places[0].host for place in places)
        case "broadcast":
            return {place.device for place in places} == {CPU} or len({place.device for place in places}) == len(places)
        case "disk":  # A version on disk is a folder that Hugging Face's loaders read: whole weights.
            return False


def colocated_rank(trainers: Sequence[ProcessLocation], engine: ProcessLocation) -> int | None:
    """The rank of a trainer whose memory this engine can see: on its GPU, or, on a CPU, on its host."""
    if engine.device == CPU and not hasattr(os, "memfd_create"):
        return None
    return next((rank for rank, place in enumerate(trainers) if place.can_share_memory_with(engine)), None)
