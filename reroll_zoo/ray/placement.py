"""Where Ray's actors go: room reserved on the cluster's CPUs, and its GPUs by index. This file and `runtime.py` import ray."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reroll.errors import NoRoom, RerollError
from reroll_zoo.gpu_nodes import MEMORY_LABEL, TYPE_LABEL, GpuNode
from reroll_zoo.plan.cluster import DEVICES

GPU_SHARE = 1 / 16
"""What one actor asks of its GPU: so many roles may share a device. Leases, not Ray, make them take turns."""
PROBE_TIMEOUT_S = 300.0
"""How long a node may take to start a process on each GPU that was reserved there."""
LOOK_S = 0.5
"""How long a thread waits inside Ray at most before it looks whether it is still to wait."""
RAY_KINDS = {"H100": "h100", "H200": "h200", "A100-80G": "a100", "L40S": "l40s", "GeForce-RTX-4090": "rtx4090"}
"""What Ray calls them. Its plain `A100` is left out: there are two sizes, and Ray does not tell them apart."""


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """A reserved place for actors."""

    group: Any
    index: int
    """In its placement group."""
    device: str
    """As torch names it inside the actor, which sees its own GPUs only."""
    node_id: str | None = None
    """None: wherever Ray finds room."""
    gpu_ids: tuple[str, ...] = ()
    """The GPUs that an actor here is shown, as their node names them."""
    is_shared: bool = False
    """Whether its CPU is that of any number of actors."""

    def options(self) -> dict[str, Any]:
        """What Ray needs to know to put an actor here."""
        resources = {"num_cpus": int(not self.is_shared)} if self.device == "cpu" else {"num_cpus": 0, "num_gpus": GPU_SHARE}
        return {**resources, "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index)}


class NodeGpus(NamedTuple):
    """A node that has GPUs."""

    node_id: str
    gpus: GpuNode


def live_gpu_nodes() -> list[NodeGpus]:
    """The live ones: this node first, then the others by address. Raises RerollError if a label says what cannot be."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    nodes.sort(key=lambda node: (node["NodeID"] != here, ip_address(node["NodeManagerAddress"]), node["NodeID"]))
    try:
        return [NodeGpus(node["NodeID"], gpu_node(int(node["Resources"]["GPU"]), node["Labels"])) for node in nodes]
    except ValueError as error:
        raise RerollError(str(error)) from error


def gpu_node(num_gpus: int, labels: Mapping[str, str]) -> GpuNode:
    """A node of a running cluster, by its labels. Raises ValueError if the one that gives its memory is no number."""
    said, kind = labels.get(MEMORY_LABEL), RAY_KINDS.get(labels.get(TYPE_LABEL, ""))
    try:
        memory_gb = float(said) if said is not None else DEVICES[kind].sold_gb if kind else None
    except ValueError:
        raise ValueError(f"a node has the label {MEMORY_LABEL}={said}: give the GB of one GPU as a number") from None
    return GpuNode(num_gpus, labels, memory_gb)


class GpuPlacements:
    """The cluster's GPUs as one row: this node's first, then the other nodes' by address; on each node by GPU id.

    A node's GPUs are reserved together the first time one of them is named, one bundle each, and stay reserved: that is
    how index 2 is the same device for every role, and how roles share it.
    """

    def __init__(self, timeout_s: float, given_up: threading.Event) -> None:
        """Whoever waits for room leaves without it once all is `given_up`."""
        self._timeout_s, self._given_up = timeout_s, given_up
        self._nodes: list[NodeGpus] = []
        self._groups: list[Any] = []
        self._places: dict[int, ActorPlacement] = {}
        self._given: set[int] = set()

    def reserve(self, devices: Sequence[str], *, role: str, timeout_s: float | None = None) -> ActorPlacement:
        """The place of a worker on one GPU, or on several of one node. Raises RerollError where there is none in time."""
        indices = [int(device) for device in devices]
        if any(index not in self._places for index in indices):
            self._reserve_node_of(indices, role=role, timeout_s=timeout_s or self._timeout_s)
        places = [self._places[index] for index in indices]
        if len({place.node_id for place in places}) > 1:
            raise self._torn(indices, role=role)
        self._given.update(indices)
        # An actor sits in one bundle, the first. The others are reserved with it, and it is shown all of them.
        return dataclasses.replace(places[0], gpu_ids=tuple(gpu_id for place in places for gpu_id in place.gpu_ids))

    def replace(self, place: ActorPlacement, *, role: str) -> ActorPlacement:
        """Where the worker of a lost actor may go: its old place, or spare GPUs elsewhere if that node is lost."""
        live = {node.node_id for node in live_gpu_nodes()}
        if place.node_id is None or place.node_id in live:
            return place
        num_gpus = len(place.gpu_ids)
        for devices in self._spare_devices(num_gpus, live):
            return self.reserve(devices, role=role)
        raise NoRoom(f"the node of a worker of {role} is lost, and no other has {num_gpus} spare GPUs")

    def spare(self, at_most: int, *, num_gpus: int, role: str, timeout_s: float) -> list[ActorPlacement]:
        """Places of so many GPUs each that no worker has been given, and that no other job holds."""
        places: list[ActorPlacement] = []
        for devices in self._spare_devices(num_gpus, {node.node_id for node in live_gpu_nodes()}):
            if len(places) < at_most:
                with suppress(NoRoom):
                    places.append(self.reserve(devices, role=role, timeout_s=timeout_s))
        return places

    def give_back(self, place: ActorPlacement) -> None:
        """What a worker had is spare again."""
        self._given -= {
            index
            for index, known in self._places.items()
            if known.node_id == place.node_id and known.gpu_ids[0] in place.gpu_ids
        }

    def free(self) -> None:
        """Give every GPU back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self._places.clear()
        self._given.clear()

    def _spare_devices(self, num_gpus: int, live: Collection[str]) -> list[list[str]]:
        """GPUs of live nodes that no worker has been given, so many of one node at a time."""
        spare_devices, first = [], 0
        for node in self._row():
            spare = [str(index) for index in range(first, first + node.gpus.num_gpus) if index not in self._given]
            if node.node_id in live:
                spare_devices += [spare[start : start + num_gpus] for start in range(0, len(spare) - num_gpus + 1, num_gpus)]
            first += node.gpus.num_gpus
        return spare_devices

    def _row(self) -> list[NodeGpus]:
        """Every node in the order of indices. Lost ones keep theirs, and new ones come last: an index never changes hands."""
        known = {node.node_id for node in self._nodes}
        self._nodes += [node for node in live_gpu_nodes() if node.node_id not in known]
        return self._nodes

    def _reserve_node_of(self, indices: Sequence[int], *, role: str, timeout_s: float) -> None:
        first = 0
        for node_id, gpus in self._row():
            inside = [index for index in indices if first <= index < first + gpus.num_gpus]
            if inside and len(inside) < len(indices):
                raise self._torn(indices, role=role)
            if inside:
                what, bundles = f"the {gpus.num_gpus} GPUs of node {node_id}", [{"GPU": 1.0}] * gpus.num_gpus
                group = reserve_bundles(bundles, what=what, timeout_s=timeout_s, given_up=self._given_up, node_id=node_id)
                self._groups.append(group)
                for offset, (bundle, gpu_id) in enumerate(self._bundles_by_gpu_id(group, gpus.num_gpus, what=what)):
                    self._places[first + offset] = ActorPlacement(group, bundle, "cuda:0", node_id, (gpu_id,))
                return
            first += gpus.num_gpus
        raise NoRoom(f"GPU {indices[0]} does not exist: Ray sees {first} GPUs, numbered from 0: change devices")

    def _bundles_by_gpu_id(self, group: Any, num_bundles: int, *, what: str) -> list[tuple[int, str]]:
        """(bundle index, GPU id) in the order of the GPUs that Ray gave them."""

        def gpu_id() -> str:
            return str(ray.get_gpu_ids()[0])

        probe = ray.remote(gpu_id)
        strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(num_bundles)]
        asked = [probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote() for strategy in strategies]

        def have_answered(seconds: float) -> bool:
            return not ray.wait(asked, num_returns=num_bundles, timeout=seconds)[1]

        if not comes_true(have_answered, timeout_s=PROBE_TIMEOUT_S, given_up=self._given_up):
            raise NoRoom(f"Ray has reserved {what}, and starts no process there within {PROBE_TIMEOUT_S:g} s: see ray status")
        return sorted(enumerate(ray.get(asked)), key=lambda found: (len(found[1]), found[1]))

    def _torn(self, indices: Sequence[int], *, role: str) -> RerollError:
        sizes = ", ".join(str(node.gpus.num_gpus) for node in self._row())
        return RerollError(
            f"a worker of {role} spans GPUs {', '.join(map(str, indices))}, which are not on one node: the nodes have {sizes} "
            "GPUs. Lower tp, or name devices that fill whole nodes"
        )


def spare_cpus(
    taken: Sequence[ActorPlacement], at_most: int, *, what: str, timeout_s: float, given_up: threading.Event
) -> list[ActorPlacement]:
    """A place on each live node that has none of those taken, and a CPU to spare."""
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    nodes -= {place.node_id or placement_group_table(place.group)["bundles_to_node_id"][place.index] for place in taken}
    places: list[ActorPlacement] = []
    for node_id in sorted(nodes):
        if len(places) < at_most:
            with suppress(NoRoom):
                group = reserve_bundles([{"CPU": 1}], what=what, timeout_s=timeout_s, given_up=given_up, node_id=node_id)
                places.append(ActorPlacement(group, 0, "cpu", node_id))
    return places


def reserve_bundles(
    bundles: list[dict[str, float]], *, what: str, timeout_s: float, given_up: threading.Event, node_id: str | None = None
) -> Any:
    """A placement group that holds these bundles, once Ray has room for it. Raises NoRoom if it has none in time."""
    selector = [{"ray.io/node-id": node_id}] * len(bundles) if node_id else None
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=selector)
    if not comes_true(group.wait, timeout_s=timeout_s, given_up=given_up):
        remove_placement_group(group)
        total, free = ray.cluster_resources(), ray.available_resources()
        held = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))
        raise NoRoom(
            f"Ray has no room for {what}: it needs {len(bundles)} bundles of {bundles[0]}, and there are {held}. "
            "Raise runtime.num_cpus, use fewer workers, or end the job that holds them"
        )
    return group


def comes_true(wait: Callable[[float], bool], *, timeout_s: float, given_up: threading.Event) -> bool:
    """Whether what Ray is asked to `wait` for comes true in time, and before it is given up.

    A thread that is inside Ray when this process leaves the cluster does not come back, not even when its time is up: so it
    looks out every now and then.
    """
    deadline_s = time.monotonic() + timeout_s
    while not given_up.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
        if wait(min(left_s, LOOK_S)):
            return True
    return False
