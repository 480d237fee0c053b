"""Workers as Ray actors, over one node or many. Only this file and `places.py` import ray."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.runtime.base import A, Calls, P, Placement, Runtime, T, W, WorkerInfo, Workers
from reroll.runtime.cpu import OMP, core_watch, keep_freed_memory, torch_threads
from reroll.runtime.devices import num_usable_cores
from reroll.runtime.failures import Raised, gather_all, guarded
from reroll.runtime.subprocesses import (
    mark_what_this_starts,
    outlive_sigterm,
    search_path,
    sheltered_from_sigterm,
    with_one_thread,
)
from reroll.runtime.watchdog import NUM_LOOKS, Waits, end_if_it_hangs, is_stopped, print_stacks_when_asked
from reroll_zoo.gpu_nodes import GpuNodes
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.ray.placement import ActorPlacement, GpuPlacements, live_gpu_nodes, reserve_bundles, spare_cpus

MIN_LOGICAL_CPUS = 4
"""Roles on a small machine share its cores: Ray must not refuse the third actor of a laptop."""
REACH_TIMEOUT_S = 20.0
"""How long the head of a cluster may take to accept a connection."""
PLACEMENT_TIMEOUT_S = 10.0
"""How long to wait for room in a Ray of our own."""
SHARED_PLACEMENT_TIMEOUT_S = 120.0
"""The same in a cluster, where other jobs give resources back and nodes are added."""
STOP_TIMEOUT_S = 5.0
"""How long a worker may take to close before its process is killed."""
REVIVAL_TIMEOUT_S = 30.0
"""How long to wait for room for a worker that is started anew."""
SPARE_TIMEOUT_S = 5.0
"""How long to wait for room that looks free for a worker that may join: another job may have it."""
REVIVAL_POLL_S = 1.0
"""Between two looks for it."""
WATCH = "watch"
"""The thread of an actor that only says that it is there."""
_NODE_DIED = "its node has died"
"""Ray's words for it, which it tells in no other way."""

log = logging.getLogger(__name__)


class RayRuntime(Runtime):
    """Runs workers as actors. Roles that name the same GPU get the same GPU.

    Starts Ray on this machine, or joins the cluster at `address`. A Ray that already runs in this process is used as it
    is, and left running.
    """

    def __init__(self, config: RayRuntimeConfig) -> None:
        super().__init__()
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(config)
        self._timeout_s = PLACEMENT_TIMEOUT_S if self._owns_ray and config.address is None else SHARED_PLACEMENT_TIMEOUT_S
        self._given_up = threading.Event()
        """Nobody is to wait for room any more."""
        self._gpus = GpuPlacements(self._timeout_s, self._given_up)
        self._threads = ThreadPoolExecutor(thread_name_prefix="ray-room")
        """Those that look for room, which takes a while: they must be out of Ray before it is left."""
        self._waits = Waits(config.watchdog_s)

    @property
    def shares_memory(self) -> bool:
        return False

    @property
    def num_gpus(self) -> int:
        return sum(node.num_gpus for node in self.gpu_nodes)

    @property
    def gpu_nodes(self) -> GpuNodes:
        return GpuNodes(node.gpus for node in live_gpu_nodes())

    @property
    def host(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    async def spawn(
        self, worker_class: Callable[Concatenate[WorkerInfo, P], W], placement: Placement, *args: P.args, **kwargs: P.kwargs
    ) -> Workers[W]:
        places, group = await self._on_a_thread(partial(self._places, placement))
        actors = [
            _Handle(WorkerInfo(placement.role, rank, len(places), place.device), place, placement, waits=self._waits)
            for rank, place in enumerate(places)
        ]
        # Pickled here and not by Ray, so that an actor can set its number of threads before torch is unpickled.
        recipe = ray.put((search_path(), ray.cloudpickle.dumps((worker_class, args, kwargs))))
        again = partial(self._again, recipe)
        workers: RayWorkers[W] = RayWorkers(actors, group, recipe, again=again, more=self._more, give_back=self._give_back)
        return await self._once_built(workers, workers.build())

    async def _more(self, actors: Sequence[_Handle], at_most: int) -> list[_Handle]:
        """Actors for more workers like these, in places that nobody has."""
        try:
            places = await self._on_a_thread(partial(self._spare_places, actors, at_most))
        except RayError as error:
            raise RerollError(f"Ray does not say where there is room: {error}") from None
        infos = [replace(actors[0].info, rank=len(actors) + number) for number in range(len(places))]
        return [_Handle(info, place, actors[0].placement, waits=self._waits) for info, place in zip(infos, places, strict=True)]

    def _spare_places(self, actors: Sequence[_Handle], at_most: int) -> list[ActorPlacement]:
        """Spare GPUs if these have GPUs; else one place on each node that has none of them."""
        role, first = actors[0].info.role, actors[0].place
        if first.device != "cpu":
            return self._gpus.spare(at_most, num_gpus=len(first.gpu_ids), role=role, timeout_s=SPARE_TIMEOUT_S)
        taken = [actor.place for actor in actors if not actor.has_left]
        what = f"role {role}"
        return spare_cpus(taken, at_most, what=what, timeout_s=SPARE_TIMEOUT_S, given_up=self._given_up)

    def _give_back(self, place: ActorPlacement) -> None:
        """The place of a worker that had joined."""
        if place.device != "cpu":
            self._gpus.give_back(place)
        elif ray.is_initialized():
            remove_placement_group(place.group)

    async def _again(self, recipe: Any, gone: _Handle) -> _Handle:
        """Another actor for the worker of one that is gone."""
        actor = await self._placed_again(gone)
        try:
            await actor.build(recipe)
        except BaseException:
            actor.kill()
            raise
        return actor

    async def _placed_again(self, gone: _Handle) -> _Handle:
        deadline_s = time.monotonic() + REVIVAL_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            place = await self._on_a_thread(partial(self._gpus.replace, gone.place, role=gone.info.role))
            actor = _Handle(gone.info, place, gone.placement, waits=self._waits)
            try:
                await asyncio.wait_for(actor.started(), left_s)
                return actor
            except (TimeoutError, WorkerDied):  # For a moment Ray may still offer the node that is lost.
                actor.kill()
            await asyncio.sleep(REVIVAL_POLL_S)
        raise RerollError(f"Ray found no room for {gone.name} within {REVIVAL_TIMEOUT_S:g} s")

    async def _on_a_thread(self, look: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    async def close(self) -> None:
        self._given_up.set()
        await super().close()
        await asyncio.to_thread(self._threads.shutdown)
        if not ray.is_initialized():
            return
        self._gpus.free()
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)

    def _places(self, placement: Placement) -> tuple[list[ActorPlacement], Any]:
        """One place per worker, and the role's own placement group: it holds the CPU places, if there are any.

        GPU places belong to all roles.
        """
        role, num_on_cpu, group = placement.role, placement.devices_of_workers.count(("cpu",)), None
        num_places = placement.num_places or num_on_cpu
        if num_on_cpu:
            bundles, what = [{"CPU": 1.0}] * num_places, f"role {role}"
            group = reserve_bundles(bundles, what=what, timeout_s=self._timeout_s, given_up=self._given_up)
        is_shared = num_places < num_on_cpu
        cpus = (ActorPlacement(group, index % num_places, device="cpu", is_shared=is_shared) for index in range(num_on_cpu))
        workers = placement.devices_of_workers
        return [next(cpus) if own == ("cpu",) else self._gpus.reserve(own, role=role) for own in workers], group


class RayWorkers(Workers[W]):
    """Workers in actors."""

    def __init__(
        self,
        actors: Sequence[_Handle],
        group: Any,
        recipe: Any,
        *,
        again: Callable[[_Handle], Awaitable[_Handle]],
        more: Callable[[Sequence[_Handle], int], Awaitable[list[_Handle]]],
        give_back: Callable[[ActorPlacement], None],
    ) -> None:
        """`again` makes another actor for the worker of one that is gone; `more`, actors beside these, so many at most, whose
        places are given back when they leave."""
        super().__init__(len(actors))
        self._actors = list(actors)
        self._num_spawned = len(actors)
        self._group, self._recipe = group, recipe
        self._again, self._more, self._give_back = again, more, give_back

    async def build(self) -> None:
        """Make every worker, each in its actor."""
        await gather_all([actor.build(self._recipe) for actor in self._actors])

    def broadcast(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Calls[T]:
        # Stored once and read by every actor; passed directly, large arguments would be stored once per actor.
        arguments = ray.put((args, kwargs)) if self.size > 1 else (args, kwargs)
        return Calls(actor.call(method, arguments) for actor in self._actors)

    def scatter(self, method: Callable[[W, A], T], shards: Sequence[A]) -> Calls[T]:
        self._expect_one_each(shards)
        num_takers = Counter(map(id, shards))
        stored: dict[int, Any] = {}
        for shard in shards:
            if num_takers[id(shard)] > 1 and id(shard) not in stored:  # Ray itself stores what is large and has one taker.
                stored[id(shard)] = ray.put(((shard,), {}))
        arguments = [stored.get(id(shard), ((shard,), {})) for shard in shards]
        return Calls(actor.call(method, argument) for actor, argument in zip(self._actors, arguments, strict=True))

    async def one(self, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._actors[rank].call(method, (args, kwargs))
        return result

    async def _restart(self, rank: int) -> None:
        gone = self._actors[rank]
        gone.kill()
        actor = await self._again(gone)
        if gone.is_stopped:  # All were stopped in the meantime.
            actor.kill()
        self._actors[rank] = actor

    async def join(self, at_most: int) -> list[RerollError | None]:
        made = await self._more(self._actors, at_most)
        first = self.size
        self._actors += made
        self._num_lives += [1] * len(made)
        self.size += len(made)
        return await asyncio.gather(*(self._built(rank) for rank in range(first, self.size)))

    async def _built(self, rank: int) -> RerollError | None:
        actor = self._actors[rank]
        try:
            await asyncio.wait_for(actor.started(), REVIVAL_TIMEOUT_S)
            await actor.build(self._recipe)
            return None
        except TimeoutError:
            error = RerollError(f"Ray has not started {actor.name} within {REVIVAL_TIMEOUT_S:g} s")
        except RerollError as failure:
            error = failure
        await self.leave(rank)
        return error

    async def leave(self, rank: int) -> None:
        actor = self._actors[rank]
        if not actor.has_left:
            actor.has_left = True
            actor.kill()
            self._give_back(actor.place)

    async def stop(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*(actor.stop(at_once=at_once) for actor in self._actors))
        for rank in range(self._num_spawned, self.size):
            await self.leave(rank)
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)


class _Handle:
    """One actor as the controller sees it."""

    def __init__(self, info: WorkerInfo, place: ActorPlacement, placement: Placement, *, waits: Waits) -> None:
        self._waits, self._is_watched = waits, not placement.runs_user_code  # Which has time limits of its own.
        self.name = f"{info.role}[{info.rank}]"
        self.info, self.place, self.placement = info, place, placement
        self.is_stopped = self.has_left = False
        self._num_calls = 0
        """That somebody waits for."""
        self._watch: asyncio.Task[None] | None = None
        self._home: tuple[str, int] | None = None
        """Its node and process, once its worker is built."""
        self._end: str | None = None
        """What became of it, if it was ended from here."""
        actor_class = ray.remote(concurrency_groups={WATCH: 1})(_Actor).options(
            max_concurrency=placement.concurrency, **place.options()
        )
        watchdog_s = waits.limit_s if self._is_watched else None
        self._actor = actor_class.remote(info, os.environ.get(OMP), place.gpu_ids, placement.runs_user_code, watchdog_s)

    def started(self) -> Awaitable[None]:
        """Its process runs: there was room for it."""
        return self._result(self._actor.__ray_ready__.remote(), "its start")

    def kill(self) -> None:
        """End its process now; harmless if it has ended."""
        if ray.is_initialized():
            ray.kill(self._actor)

    async def build(self, recipe: Any) -> None:
        """Make the worker inside the actor."""
        await self._result(self._actor.build.remote(recipe), "its start")
        self._home = await self._result(self._actor.where.remote(), "its start")

    def call(self, method: Callable[..., Any], arguments: Any) -> Awaitable[Any]:
        """Send a call now; its result is awaited."""
        if self.is_stopped:
            raise WorkerError(f"worker {self.name} was stopped: it takes no more calls")
        return self._result(self._actor.call.remote(method.__name__, arguments), method.__qualname__)

    async def stop(self, *, at_once: bool) -> None:
        """Close the worker after the calls that wait now, unless at once, then end its process. Safe to call twice."""
        if self.is_stopped or not ray.is_initialized():
            return
        self.is_stopped = True
        if not at_once:
            await self._close()
        self.kill()

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(self._result(self._actor.close.remote(), "its end"), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("worker %s is busy and did not close within %g s: killed", self.name, STOP_TIMEOUT_S)
        except WorkerDied:
            log.info("worker %s had ended before it was stopped", self.name)
        except RerollError as error:
            log.warning("worker %s failed to close: %s", self.name, error)

    async def _result(self, reference: Any, what: str) -> Any:
        wait = self._begin(what)
        try:
            outcome = await reference
        except (RayActorError, OutOfMemoryError) as error:
            raise self._died(error) from None
        except RayError as error:
            raise WorkerError(f"a call to worker {self.name} could not be carried: {error}") from None
        finally:
            self._is_over(wait)
        if isinstance(outcome, Raised):
            raise outcome.as_error()
        return outcome

    def _begin(self, what: str) -> int:
        self._num_calls += 1
        if self._num_calls == 1 and self._is_watched and self._home and self._waits.limit_s is not None:
            self._watch = asyncio.create_task(self._look_whether_it_answers(self._waits.limit_s, *self._home))
        return self._waits.begin(self.name, what)

    def _is_over(self, wait: int) -> None:
        self._waits.end(wait)
        self._num_calls -= 1
        if not self._num_calls and self._watch is not None:
            self._watch.cancel()

    async def _look_whether_it_answers(self, limit_s: float, node_id: str, pid: int) -> None:
        """While somebody waits for it: one that a signal has stopped cannot end itself, and is ended when the limit is over."""
        try:
            while True:
                await asyncio.wait_for(self._actor.where.remote(), limit_s)
                await asyncio.sleep(limit_s / NUM_LOOKS)
        except TimeoutError:
            self._waits.tell(self.name)
            self._end = f"was stopped by a signal, or its node is out of reach: it did not answer within {limit_s:g} s"
            self.kill()  # Ray asks the process itself to end, which one that is stopped does not hear.
            on_its_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            ray.remote(_kill_stopped).options(num_cpus=0, scheduling_strategy=on_its_node).remote(pid)
        except RayError:
            return  # It is gone: whoever waits for it is told.

    def _died(self, error: RayError) -> WorkerDied:
        how = self._end or "was killed, ran out of memory or crashed, or its node was lost"
        if self._end is None and self._is_watched and self._waits.may_hang(self.name):
            self._waits.tell(self.name)
            how = f"hung in {self._waits.of(self.name)} and ended itself, its stacks in Ray's log of it; or {how}"
        return WorkerDied(
            f"worker {self.name} is gone: its process {how}. Free memory or ask for less of it, then go on from the last "
            f"checkpoint with --resume. Ray says: {error}",
            how="died (killed, out of memory, crashed, or its node was lost)",
            had_read=False if _NODE_DIED in str(error) else None,
        )


class _Actor:
    """The process around one worker. Exceptions are returned, not raised: Ray would wrap them in classes of its own."""

    def __init__(
        self,
        info: WorkerInfo,
        num_threads: str | None,
        gpu_ids: Sequence[str],
        runs_user_code: bool,
        watchdog_s: float | None,
    ) -> None:
        self._info = info
        self._pid = os.getpid()
        if not outlive_sigterm():
            # In a Ray that others started. Ray's own answer is an exception in whatever runs: a call that hangs would fail like
            # any other, and the calls behind it would still be served by a process that was told to end.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        print_stacks_when_asked()
        end_if_it_hangs(watchdog_s)
        if len(gpu_ids) > 1:  # Ray shows an actor the GPU of its bundle only.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        self._worker: Any = None
        if runs_user_code:  # Which may have a limit of memory, and computes little.
            os.environ.update({**with_one_thread(), OMP: num_threads or "1"})
            mark_what_this_starts(uuid.uuid4().hex)
        else:
            keep_freed_memory()
            core_watch()
            _set_threads(num_threads, num_workers=info.world_size)

    def build(self, recipe: tuple[list[str], bytes]) -> Any:
        folders, pickled = recipe
        sys.path.extend(path for path in folders if path not in sys.path)

        def make() -> None:
            worker_class, args, kwargs = pickle.loads(pickled)
            self._worker = worker_class(self._info, *args, **kwargs)
            gc.freeze()  # As `gc_frozen` does for the controller: what is there now stays.

        return self._guard(make)

    def call(self, method_name: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return self._guard(lambda: getattr(self._worker, method_name)(*args, **kwargs))

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def where(self) -> tuple[str, int]:
        """Its node and process. Answered beside whatever it does."""
        return ray.get_runtime_context().get_node_id(), self._pid

    def close(self) -> Any:
        close = getattr(self._worker, "close", None)
        return self._guard(close) if close is not None else None

    def _guard(self, call: Callable[[], Any]) -> Any:
        outcome = guarded(call, role=self._info.role, rank=self._info.rank)
        if os.getpid() != self._pid:
            os._exit(1)  # A fork of the worker's that came back here: the original answers.
        return outcome


def _kill_stopped(pid: int) -> None:
    """On the node of a process."""
    if is_stopped(pid):
        os.kill(pid, signal.SIGKILL)


def _set_threads(num_threads: str | None, *, num_workers: int) -> None:
    """Let torch use what the user's environment says, else this worker's share of the cores, where Ray allows one thread."""
    os.environ.pop(OMP, None)
    os.environ.update(torch_threads(num_threads, num_workers=num_workers))


def _reach(address: str) -> None:
    """Raise RerollError if nothing listens at `host:port`: Ray itself tries for minutes, and then ends the process."""
    host, colon, port = (os.environ.get("RAY_ADDRESS", address) if address == "auto" else address).rpartition(":")
    if not colon or "//" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise RerollError(
            f"no Ray cluster answers at {host}:{port} ({error}): is it up (ray status), and is that its address? "
            "runtime.address null starts Ray on this machine"
        ) from None


def _start_ray(config: RayRuntimeConfig) -> None:
    if config.address is not None:
        _reach(config.address)
        try:
            ray.init(config.address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise RerollError(
                f"cannot join the Ray cluster at {config.address}: is it up (ray status)? One that was started with a token "
                "needs RAY_AUTH_MODE=token here, and the same token in ~/.ray/auth_token or RAY_AUTH_TOKEN. "
                f"Ray says: {error.__cause__ or error}"
            ) from None
        return
    num_cpus = config.num_cpus or max(MIN_LOGICAL_CPUS, num_usable_cores())
    with sheltered_from_sigterm():
        ray.init(
            "local",
            num_cpus=num_cpus,
            num_gpus=config.num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
