"""Where code runs. A pipeline spawns workers and calls them; it cannot tell threads from processes or Ray actors.

The unbound method is the address: `await workers.scatter(TrainWorker.train, shards)`. A type checker follows it,
and so does "go to definition".
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from reroll.config.host import SelectableNodes, parse_devices
from reroll.config.parts import Devices
from reroll.errors import NoRoom, RerollError, WorkerTimeout
from reroll.runtime.failures import gather_all

W = TypeVar("W")
P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is told about itself: the first argument of every worker class."""

    role: str
    rank: int
    world_size: int
    device: str
    """A torch device string as seen inside the worker, e.g. `cpu` or `cuda:0`; of several, the first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers of one role go: one worker per entry."""

    role: str
    devices: tuple[str | tuple[str, ...], ...]
    """`cpu`, a GPU index as text, or the several GPUs of one machine that a worker spans; one entry per worker."""
    concurrency: int = 1
    """Calls that one worker may serve at the same time."""
    runs_user_code: bool = False
    """Rewards and environments: many run beside the models. In a process of its own such a worker computes with one thread,
    prints nowhere, and sees the GPUs that the controller sees."""
    num_places: int | None = None
    """Of workers on the CPU, in how many places they live. On Ray a place is one CPU of a node, whatever number of them share
    it; None: each has its own. On one machine it means nothing."""

    @property
    def devices_of_workers(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each worker."""
        return tuple((own,) if isinstance(own, str) else own for own in self.devices)


class Calls(tuple[Awaitable[T], ...]):
    """Calls to several workers, in rank order. Awaited as a whole they give their results; all have ended before the first
    error is raised. Whoever must act on that error sooner awaits them one by one."""

    def __await__(self) -> Generator[Any, None, list[T]]:
        return gather_all(self).__await__()


class Workers(ABC, Generic[W]):
    """Handles to the workers of one role, in rank order.

    An exception in a worker arrives as WorkerError with the worker's own traceback in its message, or as itself if it
    is a RerollError; a worker whose process is gone gives WorkerDied.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_lives = [1] * size
        """How often each worker was built."""

    def broadcast(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Calls[T]:
        """The same call on every worker."""
        return Calls(self.one(rank, method, *args, **kwargs) for rank in range(self.size))

    def scatter(self, method: Callable[[W, A], T], shards: Sequence[A]) -> Calls[T]:
        """One shard to each worker; as many shards as workers. A shard that several are given is sent to them once."""
        self._expect_one_each(shards)
        return Calls(self.one(rank, method, shard) for rank, shard in enumerate(shards))

    @abstractmethod
    async def one(self, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call on one worker."""

    async def one_within(
        self, timeout_s: float, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `one`, under a time limit that includes the wait behind other calls to this worker.

        A worker that overruns it is ended, with all that it started, and built anew; then raises WorkerTimeout. (A thread
        cannot be ended: it is left to itself.) An answer that has come counts, however late this event loop looks.
        """
        life = self._num_lives[rank]
        call = asyncio.ensure_future(self.one(rank, method, *args, **kwargs))
        try:
            await asyncio.wait([call], timeout=timeout_s)
            if call.done():
                return call.result()
        finally:
            call.cancel()
        end = "its worker was started anew"
        if self._num_lives[rank] == life:  # Else another call has overrun too, and the worker is a new one.
            try:
                await self.restart(rank)
            except RerollError as error:
                end = f"its worker was ended, and could not be started anew: {error}"
        raise WorkerTimeout(f"{method.__qualname__} took longer than {timeout_s:g} s: {end}")

    async def restart(self, rank: int) -> None:
        """End what is left of a worker and build it anew, as it was spawned: in its place, or elsewhere if that is lost.

        Raises RerollError if there is no room for it or it cannot be built; calls to it then give WorkerDied as before.
        """
        self._num_lives[rank] += 1
        await self._restart(rank)

    @abstractmethod
    async def _restart(self, rank: int) -> None: ...

    async def join(self, at_most: int) -> list[RerollError | None]:
        """Build more workers, as these were spawned, in places that nobody has: on a cluster that has grown, or has room.

        They get the ranks from `size` on, which grows by as many as were tried. For each: what kept it from being built, or
        None. A machine of its own does not grow.
        """
        return []

    async def leave(self, rank: int) -> None:
        """End a worker that has joined, for good: its place is free for another. Calls to it give WorkerDied."""
        raise NotImplementedError("nobody joins here")

    def _expect_one_each(self, shards: Sequence[object]) -> None:
        if len(shards) != self.size:
            raise ValueError(f"scatter needs one shard per worker: got {len(shards)} shards for {self.size} workers")

    @abstractmethod
    async def stop(self, *, at_once: bool = False) -> None:
        """Call `close()` on each worker that has one, after the calls that wait now, and let them go. Safe to call twice.

        `at_once`: end them in the midst of whatever they do, without a call to `close()`. (Threads are left to themselves.)
        """


class Runtime(ABC):
    """Makes workers. `async with make_runtime(config) as runtime:` closes it and every worker it spawned."""

    def __init__(self) -> None:
        self._spawned: list[Workers[Any]] = []

    @abstractmethod
    async def spawn(
        self, worker_class: Callable[Concatenate[WorkerInfo, P], W], placement: Placement, *args: P.args, **kwargs: P.kwargs
    ) -> Workers[W]:
        """Build `worker_class(info, *args, **kwargs)` once per entry of the placement, in parallel."""

    async def close(self) -> None:
        """Stop every worker it spawned. Safe to call twice."""
        await asyncio.gather(*(workers.stop() for workers in self._spawned))
        self._spawned.clear()

    async def _once_built(self, workers: Workers[W], building: Awaitable[Any]) -> Workers[W]:
        """Workers that are this runtime's to stop, when they are built; where one cannot be, all of them are stopped."""
        self._spawned.append(workers)
        try:
            await building
        except BaseException:
            await workers.stop()
            raise
        return workers

    @property
    @abstractmethod
    def shares_memory(self) -> bool:
        """Whether workers live in this process, so that tensors pass by reference."""

    @property
    @abstractmethod
    def num_gpus(self) -> int:
        """GPUs that placements may name, as indices from 0."""

    @property
    def gpu_nodes(self) -> SelectableNodes | None:
        """The machines that devices are selected from by label or memory; None: this runtime takes indices only."""
        return None

    @property
    def host(self) -> str:
        """An address of this process's machine that its workers reach."""
        return "127.0.0.1"

    def devices(self, value: Devices) -> tuple[str, ...]:
        """The devices a config names, as `Placement` takes them. `auto` is every GPU of this runtime, else the CPU.

        Raises NoRoom if a selection finds too few.
        """
        try:
            return parse_devices(value, num_gpus=self.num_gpus, nodes=self.gpu_nodes)
        except ValueError as error:
            raise NoRoom(str(error)) from error

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()
