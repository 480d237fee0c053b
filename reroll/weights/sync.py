"""Publishes a policy's weights to its engines under a version number."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reroll.config.weights import WeightsConfig
from reroll.errors import RerollError, WeightsError, WorkerDied
from reroll.observe.metrics import Last, Stats
from reroll.weights.bucket import Bucket, Channel, GroupRank, ProcessLocation, PushBroken
from reroll.weights.choose import choose_transport, colocated_rank

T = TypeVar("T")
U = TypeVar("U")

log = logging.getLogger(__name__)


class Publisher(Protocol):
    """What sends weights: a train cluster."""

    async def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]: ...
    async def locations(self) -> list[ProcessLocation]: ...
    async def open_sender(self, channel: Channel, *, group_rank: GroupRank | None) -> None: ...
    async def begin_push(self, *, version: int, base_version: int | None) -> list[Bucket | None]: ...
    async def next_buckets(self) -> list[Bucket | None]: ...


class Subscribers(Protocol):
    """What receives them: an infer cluster, which leaves out engines that die."""

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int, adopt: bool = True) -> None: ...
    async def locations(self) -> dict[int, ProcessLocation]: ...
    async def open_receiver(self, channel: Channel, *, group_ranks: Mapping[int, GroupRank]) -> None: ...
    async def take_weights(self, buckets: Mapping[int, Bucket]) -> None: ...


class WeightSync:
    """Pushes weights from the policy to the engines.

    Workers of one process pass tensors by reference, so the engine adopts the trainer's own parameters and a push copies
    nothing. That is only sound while generation and training take turns: with a staleness budget the engine goes on
    generating during the next update, and gets a `snapshot`, copied into its own tensors. Between processes weights travel
    in buckets: the trainer gathers the next one while the engines take the last.

    Versions are whole: from its first bucket to its last an engine does not step, and one whose push broke off does not
    step until another has gone through. A push that fails is repeated in full; an engine that dies is left out.

    Only what is trained travels: of a policy with an adapter, the adapter. Where trainer and engine share memory, the
    first push also hands over the frozen weights, by reference, so that the process does not go on holding them twice.
    """

    def __init__(
        self,
        policy: Publisher,
        engine: Subscribers,
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
        self._routes: dict[int, int] = {}
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
        buckets = await self._policy.begin_push(version=version, base_version=base if self._config.delta else None)
        num_bytes, gather_s, is_whole = 0, 0.0, False
        while (first := buckets[self._first_sender]) is not None:
            num_bytes, gather_s, is_whole = num_bytes + first.num_bytes, gather_s + first.gather_s, first.is_last
            buckets = await self._deliver(buckets)
        if not is_whole:
            raise PushBroken(f"the buckets of version {version} ended before the last")
        self._confirmed = version
        return Stats({"push/bytes": Last(float(num_bytes)), "time/gather_s": Last(gather_s)})

    async def _deliver(self, buckets: list[Bucket | None]) -> list[Bucket | None]:
        """Hand these buckets to the engines while the trainers gather the next ones."""
        routed = {engine: bucket for engine, trainer in self._routes.items() if (bucket := buckets[trainer]) is not None}
        following, _ = await _both(self._policy.next_buckets(), self._engine.take_weights(routed))
        return following

    @property
    def _first_sender(self) -> int:
        return min(self._routes.values())

    async def _open_channel(self) -> None:
        """Open a channel between the trainers and the engines that are alive. It is kept until one comes, goes or fails."""
        trainers, engines = await _both(self._policy.locations(), self._engine.locations())
        if (trainers, engines) == self._members:
            return
        self._confirmed = None
        kind = choose_transport(self._config.kind, trainers, engines)
        self._routes = {rank: (colocated_rank(trainers, place) or 0) if kind == "ipc" else 0 for rank, place in engines.items()}
        channel = Channel(
            kind=kind,
            bucket_bytes=int(self._config.bucket_mb * 1e6),
            delta=self._config.delta,
            folder=self._folder.absolute() if kind == "disk" else None,
            senders=tuple(sorted(set(self._routes.values()))),
        )
        group_ranks = self._group_ranks(list(engines)) if kind == "broadcast" else {}
        await _both(
            self._policy.open_sender(channel, group_rank=group_ranks.get(None)),
            self._engine.open_receiver(
                channel, group_ranks={rank: group_rank for rank, group_rank in group_ranks.items() if rank is not None}
            ),
        )
        self._members = trainers, engines
        log.info("weights travel by %s from rank %s of the policy to %d engines", kind, channel.senders, len(engines))

    def _group_ranks(self, engines: list[int]) -> dict[int | None, GroupRank]:
        """A rank in a new process group for the sender (None) and for each engine."""
        if self._store is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        address, self._num_channels = f"{self._host}:{self._store.port}", self._num_channels + 1
        members: list[int | None] = [None, *engines]
        return {
            member: GroupRank(address, f"weights/{self._num_channels}", rank, len(members))
            for rank, member in enumerate(members)
        }


async def _both(ours: Coroutine[Any, Any, T], theirs: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Both results, once both calls are over. If both fail, a worker's death is raised: it causes the other errors."""
    tasks = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
    await asyncio.wait(tasks)
    failures = [failure for task in tasks if (failure := task.exception())]
    if failures:
        raise min(failures, key=lambda failure: not isinstance(failure, WorkerDied))
    return tasks[0].result(), tasks[1].result()
