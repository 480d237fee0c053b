"""Workers as Ray actors, over one node or many. The only file that imports ray."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Concatenate

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reroll.config.parts import RayRuntime as RayRuntimeConfig
from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.runtime.base import A, P, Placement, Runtime, T, W, WorkerInfo, Workers
from reroll.runtime.cpu import keep_freed_memory, release_helper_threads
from reroll.runtime.devices import num_usable_cores
from reroll.runtime.failures import as_reroll_error, describe, gather_all

MIN_LOGICAL_CPUS = 4
"""Roles on a small machine share its cores: Ray must not refuse the third actor of a laptop."""
PLACEMENT_TIMEOUT_S = 10.0
"""How long to wait for room in a Ray of our own."""
SHARED_PLACEMENT_TIMEOUT_S = 120.0
"""The same in a cluster, where other jobs give resources back and nodes are added."""
STOP_TIMEOUT_S = 5.0
"""How long a worker may take to close before its process is killed."""
GPU_SHARE = 1 / 16
"""What one actor asks of its GPU: so many roles may share a device. Leases, not Ray, make them take turns."""
OMP = "OMP_NUM_THREADS"
"""The variable that says how many threads torch starts with."""

log = logging.getLogger(__name__)


class RayRuntime(Runtime):
    """Runs workers as actors. Roles that name the same GPU get the same GPU.

    Starts Ray on this machine, or joins the cluster at `address`. A Ray that already runs in this process is used as it
    is, and left running.
    """

    def __init__(self, config: RayRuntimeConfig) -> None:
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(config)
        self._timeout_s = PLACEMENT_TIMEOUT_S if self._owns_ray and config.address is None else SHARED_PLACEMENT_TIMEOUT_S
        self._gpus = _GpuBundles(self._timeout_s)
        self._spawned: list[RayWorkers[Any]] = []

    @property
    def shares_memory(self) -> bool:
        return False

    @property
    def num_gpus(self) -> int:
        return sum(num_gpus for _, num_gpus in _gpu_nodes())

    @property
    def host(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    async def spawn(
        self, worker_class: Callable[Concatenate[WorkerInfo, P], W], placement: Placement, *args: P.args, **kwargs: P.kwargs
    ) -> Workers[W]:
        bundles, group = await asyncio.to_thread(self._bundles, placement)
        actors = [
            _Handle(WorkerInfo(placement.role, rank, len(bundles), bundle.device), bundle, placement.concurrency)
            for rank, bundle in enumerate(bundles)
        ]
        workers: RayWorkers[W] = RayWorkers(actors, group)
        self._spawned.append(workers)
        # Pickled here and not by Ray, so that an actor can set its number of threads before torch is unpickled.
        recipe = ray.put((_search_path(), ray.cloudpickle.dumps((worker_class, args, kwargs))))
        try:
            await gather_all([actor.build(recipe) for actor in actors])
        except BaseException:
            await workers.stop()
            raise
        return workers

    async def close(self) -> None:
        await asyncio.gather(*(workers.stop() for workers in self._spawned))
        self._spawned.clear()
        if not ray.is_initialized():
            return
        self._gpus.free()
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)

    def _bundles(self, placement: Placement) -> tuple[list[_Bundle], Any]:
        """One bundle per worker, and the role's own placement group: it holds the CPU bundles, if there are any.

        GPU bundles belong to all roles.
        """
        num_cpu_workers = placement.devices.count("cpu")
        if not num_cpu_workers:
            return [self._gpus.find(int(device)) for device in placement.devices], None
        group = _reserve([{"CPU": 1}] * num_cpu_workers, what=f"role {placement.role}", timeout_s=self._timeout_s)
        cpus = (_Bundle(group, index, device="cpu") for index in range(num_cpu_workers))
        return [next(cpus) if device == "cpu" else self._gpus.find(int(device)) for device in placement.devices], group


class RayWorkers(Workers[W]):
    """Workers in actors."""

    def __init__(self, actors: Sequence[_Handle], group: Any) -> None:
        self._actors = list(actors)
        self._group = group
        self.size = len(self._actors)

    async def all(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return await gather_all(self.each(method, *args, **kwargs))

    def each(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> list[Awaitable[T]]:
        # Stored once and read by every actor; passed directly, large arguments would be stored once per actor.
        arguments = ray.put((args, kwargs)) if self.size > 1 else (args, kwargs)
        return [actor.call(method.__name__, arguments) for actor in self._actors]

    async def scatter(self, method: Callable[[W, A], T], shards: Sequence[A]) -> list[T]:
        if len(shards) != self.size:
            raise ValueError(f"scatter needs one shard per worker: got {len(shards)} shards for {self.size} workers")
        calls = zip(self._actors, shards, strict=True)
        return await gather_all([actor.call(method.__name__, ((shard,), {})) for actor, shard in calls])

    async def one(self, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._actors[rank].call(method.__name__, (args, kwargs))
        return result

    async def stop(self) -> None:
        await asyncio.gather(*(actor.stop() for actor in self._actors))
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)


class _Handle:
    """One actor as the controller sees it."""

    def __init__(self, info: WorkerInfo, bundle: _Bundle, concurrency: int) -> None:
        self._name = f"{info.role}[{info.rank}]"
        self._stopped = False
        actor_class = ray.remote(_Actor).options(max_concurrency=concurrency, **bundle.options())
        self._actor = actor_class.remote(info, os.environ.get(OMP))

    def build(self, recipe: Any) -> Awaitable[None]:
        """Make the worker inside the actor."""
        return self._result(self._actor.build.remote(recipe))

    def call(self, method_name: str, arguments: Any) -> Awaitable[Any]:
        """Send a call now; its result is awaited."""
        if self._stopped:
            raise WorkerError(f"worker {self._name} was stopped: it takes no more calls")
        return self._result(self._actor.call.remote(method_name, arguments))

    async def stop(self) -> None:
        """Close the worker after the calls that wait now, then end its process. Safe to call twice."""
        if self._stopped or not ray.is_initialized():
            return
        self._stopped = True
        try:
            await asyncio.wait_for(self._result(self._actor.close.remote()), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("worker %s is busy and did not close within %g s: killed", self._name, STOP_TIMEOUT_S)
        except WorkerDied:
            log.info("worker %s had ended before it was stopped", self._name)
        except RerollError as error:
            log.warning("worker %s failed to close: %s", self._name, error)
        ray.kill(self._actor)

    async def _result(self, reference: Any) -> Any:
        try:
            outcome = await reference
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDied(
                f"worker {self._name} is gone: its process was killed, ran out of memory or crashed, or its node was lost. "
                f"Free memory or ask for less of it, then go on from the last checkpoint with --resume. Ray says: {error}"
            ) from None
        except RayError as error:
            raise WorkerError(f"a call to worker {self._name} could not be carried: {error}") from None
        if isinstance(outcome, _Raised):
            outcome.error.__notes__ = list(outcome.notes)
            raise outcome.error
        return outcome


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on its way to the controller. Notes travel beside it: a class that pickles itself may drop them."""

    error: RerollError
    notes: tuple[str, ...]


class _Actor:
    """The process around one worker. Exceptions are returned, not raised: Ray would wrap them in classes of its own."""

    def __init__(self, info: WorkerInfo, num_threads: str | None) -> None:
        self._info = info
        self._worker: Any = None
        keep_freed_memory()
        _set_threads(num_threads, num_workers=info.world_size)

    def build(self, recipe: tuple[list[str], bytes]) -> Any:
        search_path, pickled = recipe
        sys.path.extend(path for path in search_path if path not in sys.path)

        def make() -> None:
            worker_class, args, kwargs = pickle.loads(pickled)
            self._worker = worker_class(self._info, *args, **kwargs)

        return self._guard(make)

    def call(self, method_name: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return self._guard(lambda: getattr(self._worker, method_name)(*args, **kwargs))

    def close(self) -> Any:
        close = getattr(self._worker, "close", None)
        return self._guard(close) if close is not None else None

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            result = call()
            release_helper_threads()
            return result
        except BaseException as error:
            text = describe(error)
            home = as_reroll_error(error, role=self._info.role, rank=self._info.rank, remote_traceback=text)
            if not _survives_pickling(home):
                home = WorkerError(f"{type(error).__name__} in worker {self._info.role}[{self._info.rank}]:\n{text}")
            return _Raised(home, notes=tuple(getattr(home, "__notes__", ())))


def _search_path() -> list[str]:
    """Where this process finds modules, for actors to find them too: Ray passes on only a part of it."""
    return [os.path.abspath(path) for path in sys.path]


def _survives_pickling(error: RerollError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception as failure:
        log.debug("%r cannot be pickled: %s", error, failure)
        return False


def _set_threads(num_threads: str | None, *, num_workers: int) -> None:
    """Let torch use what the user's environment says, else this worker's share of the cores, where Ray allows one thread.

    A lone worker gets torch's own default, as in a local run: the same threads, so the same sums.
    """
    os.environ.pop(OMP, None)
    if num_threads is not None:
        os.environ[OMP] = num_threads
    elif num_workers > 1:
        os.environ[OMP] = str(max(1, num_usable_cores() // num_workers))


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A reserved place for actors."""

    group: Any
    index: int
    device: str
    """As torch names it inside the actor, where Ray shows only the actor's own GPU."""

    def options(self) -> dict[str, Any]:
        resources = {"num_cpus": 1} if self.device == "cpu" else {"num_cpus": 0, "num_gpus": GPU_SHARE}
        return {**resources, "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index)}


class _GpuBundles:
    """The cluster's GPUs as one row: this node's first, then the other nodes' by address; on each node by GPU id.

    A node's GPUs are reserved together the first time one of them is named, one bundle each, and stay reserved: that is
    how index 2 is the same device for every role, and how roles share it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._groups: list[Any] = []
        self._bundles: dict[int, _Bundle] = {}

    def find(self, index: int) -> _Bundle:
        """The bundle that holds a GPU."""
        if index not in self._bundles:
            self._reserve_node_of(index)
        return self._bundles[index]

    def free(self) -> None:
        """Give every GPU back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self._bundles.clear()

    def _reserve_node_of(self, index: int) -> None:
        first = 0
        for node_id, num_gpus in _gpu_nodes():
            if index < first + num_gpus:
                what = f"the {num_gpus} GPUs of node {node_id}"
                group = _reserve([{"GPU": 1}] * num_gpus, what=what, timeout_s=self._timeout_s, node_id=node_id)
                self._groups.append(group)
                for offset, bundle_index in enumerate(_bundles_by_gpu_id(group, num_gpus)):
                    self._bundles[first + offset] = _Bundle(group, bundle_index, device="cuda:0")
                return
            first += num_gpus
        raise RerollError(f"GPU {index} does not exist: Ray sees {first} GPUs, numbered from 0: change devices")


def _gpu_nodes() -> list[tuple[str, int]]:
    """(node id, number of GPUs) of every live node that has some, this node first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    nodes.sort(key=lambda node: (node["NodeID"] != here, ip_address(node["NodeManagerAddress"]), node["NodeID"]))
    return [(node["NodeID"], int(node["Resources"]["GPU"])) for node in nodes]


def _bundles_by_gpu_id(group: Any, num_bundles: int) -> list[int]:
    """Bundle indices in the order of the GPUs that Ray gave them."""

    def gpu_id() -> str:
        return str(ray.get_gpu_ids()[0])

    probe = ray.remote(gpu_id)
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(num_bundles)]
    ids = ray.get([probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote() for strategy in strategies])
    return sorted(range(num_bundles), key=lambda index: (len(ids[index]), ids[index]))


def _reserve(bundles: list[dict[str, float]], *, what: str, timeout_s: float, node_id: str | None = None) -> Any:
    """A placement group that holds these bundles, once Ray has room for it."""
    selector = [{"ray.io/node-id": node_id}] * len(bundles) if node_id else None
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=selector)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        total, free = ray.cluster_resources(), ray.available_resources()
        held = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))
        raise RerollError(
            f"Ray has no room for {what}: it needs {len(bundles)} bundles of {bundles[0]}, and there are {held}. "
            "Raise runtime.num_cpus, use fewer workers, or end the job that holds them"
        )
    return group


def _start_ray(config: RayRuntimeConfig) -> None:
    if config.address is not None:
        ray.init(config.address, log_to_driver=False, logging_level=logging.ERROR)
        return
    num_cpus = config.num_cpus or max(MIN_LOGICAL_CPUS, num_usable_cores())
    ray.init(
        "local",
        num_cpus=num_cpus,
        num_gpus=config.num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
