"""Workers as objects of this process, each with its own threads. Nothing to install; breakpoints work."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Concatenate, Generic

from reroll.config.host import num_visible_gpus
from reroll.config.parts import LocalRuntimeConfig
from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.runtime.base import A, Calls, P, Placement, Runtime, T, W, WorkerInfo, Workers
from reroll.runtime.cpu import core_watch, keep_freed_memory, release_helper_threads
from reroll.runtime.failures import as_reroll_error, describe, gather_all

STOP_TIMEOUT_S = 5.0
"""How long a worker may take to close before it is left behind."""

log = logging.getLogger(__name__)


def make_local(config: LocalRuntimeConfig) -> LocalRuntime:
    """The runtime of a config."""
    return LocalRuntime()


class LocalRuntime(Runtime):
    """Runs workers as threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()
        core_watch()

    @property
    def shares_memory(self) -> bool:
        return True

    @property
    def num_gpus(self) -> int:
        return num_visible_gpus()

    async def spawn(
        self, worker_class: Callable[Concatenate[WorkerInfo, P], W], placement: Placement, *args: P.args, **kwargs: P.kwargs
    ) -> Workers[W]:
        hosts = [_Host[W](info, placement.concurrency) for info in _infos(placement)]
        workers = LocalWorkers(hosts, make=lambda info: worker_class(info, *args, **kwargs))
        return await self._once_built(workers, workers.build())


class LocalWorkers(Workers[W]):
    """Workers in this process."""

    def __init__(self, hosts: Sequence[_Host[W]], *, make: Callable[[WorkerInfo], W]) -> None:
        super().__init__(len(hosts))
        self._hosts = list(hosts)
        self._make = make

    async def build(self) -> None:
        """Make every worker, each on a thread of its own."""
        await gather_all([host.build(self._make) for host in self._hosts])

    def broadcast(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Calls[T]:
        return Calls(host.call(method, *args, **kwargs) for host in self._hosts)

    def scatter(self, method: Callable[[W, A], T], shards: Sequence[A]) -> Calls[T]:
        self._expect_one_each(shards)
        return Calls(host.call(method, shard) for host, shard in zip(self._hosts, shards, strict=True))

    async def one(self, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._hosts[rank].call(method, *args, **kwargs)

    async def _restart(self, rank: int) -> None:
        gone = self._hosts[rank]
        await gone.stop()
        self._hosts[rank] = host = gone.successor()
        await host.build(self._make)

    async def stop(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*(host.stop(at_once=at_once) for host in self._hosts))


class _Host(Generic[W]):
    """One worker and the threads that run its calls, in order of arrival.

    The threads are daemons, which ThreadPoolExecutor's are not: a stuck worker must not keep the interpreter from exiting.
    """

    def __init__(self, info: WorkerInfo, num_threads: int) -> None:
        self._info = info
        self._name = f"{info.role}[{info.rank}]"
        self._num_threads = num_threads
        self._worker: W | None = None
        self._stopped = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for index in range(num_threads):
            threading.Thread(target=self._serve, name=f"{self._name}.{index}", daemon=True).start()

    def successor(self) -> _Host[W]:
        """Another for the same worker, whose threads are stuck in nothing."""
        return _Host(self._info, self._num_threads)

    def build(self, worker_class: Callable[[WorkerInfo], W]) -> asyncio.Future[None]:
        """Make the worker on one of its own threads."""

        def make() -> None:
            self._worker = worker_class(self._info)

        return self._submit(make)

    def call(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run a method on the first free thread, found by its name as on Ray: a subclass's own version is the one that runs."""
        if self._stopped or self._worker is None:
            raise WorkerError(f"worker {self._name} was stopped: it takes no more calls")
        worker = self._worker
        release_helper_threads()  # The controller's own: from here on it waits while workers compute.
        return self._submit(lambda: getattr(worker, method.__name__)(*args, **kwargs))

    async def stop(self, *, at_once: bool = False) -> None:
        """Close the worker after the calls that wait now, unless at once, then end its threads. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        if at_once:
            self._drop()
            return
        closing = self._submit(self._close)
        for _ in range(self._num_threads):
            self._calls.put(None)
        try:
            await asyncio.wait_for(closing, STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("worker %s is busy and did not close within %g s: left behind", self._name, STOP_TIMEOUT_S)
            self._drop()
        except RerollError as error:
            log.warning("worker %s failed to close: %s", self._name, error)

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return asyncio.wrap_future(future)

    def _close(self) -> None:
        worker, self._worker = self._worker, None
        close = getattr(worker, "close", None)
        if close is not None:
            close()

    def _drop(self) -> None:
        """Tell whoever waits for calls that have not begun."""
        while not self._calls.empty():
            with suppress(queue.Empty):
                item = self._calls.get_nowait()
                if item is not None and item[0].set_running_or_notify_cancel():
                    item[0].set_exception(WorkerDied(f"worker {self._name} is stuck in another call and was left behind"))
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                self._run(future, call)
            del item, future, call  # An idle thread must not keep the last call's tensors alive.

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            result = call()
            release_helper_threads()
        except BaseException as error:
            future.set_exception(
                as_reroll_error(error, role=self._info.role, rank=self._info.rank, remote_traceback=describe(error))
            )
        else:
            future.set_result(result)


def _infos(placement: Placement) -> list[WorkerInfo]:
    devices = ["cpu" if first == "cpu" else f"cuda:{first}" for first, *_ in placement.devices_of_workers]
    return [
        WorkerInfo(role=placement.role, rank=rank, world_size=len(devices), device=device)
        for rank, device in enumerate(devices)
    ]
