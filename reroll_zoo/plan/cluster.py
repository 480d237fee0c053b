"""The machines a run is planned for: what each kind of device can do, and how much of that a run is taken to reach.

Every number that the planner assumes stands here, and every one can be set from YAML under `cluster`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from reroll.config.base import Node
from reroll.config.cluster import MachinesConfig
from reroll_zoo.gpu_nodes import GpuNode, GpuNodes


class DeviceSpecConfig(Node):
    """One device, by its data sheet."""

    name: str = "device"
    """What it is called in tables and pictures."""
    memory_gib: float = Field(gt=0)
    """What a program may use of it."""
    bf16_tflops: float = Field(gt=0)
    """Dense, without sparsity."""
    fp32_tflops: float = Field(gt=0)
    """Likewise."""
    bandwidth_gb_s: float = Field(gt=0)
    """Memory bandwidth."""
    link_gb_s: float = Field(gt=0)
    """To the other devices of its node, one way."""
    host_gb_s: float = Field(gt=0)
    """To the memory of its host, one way."""
    sold_gb: float | None = Field(default=None, gt=0)
    """The memory that its name promises, which `devices: {min_memory_gb: …}` is compared with; null: `memory_gib`."""


def _spec(
    name: str, sold_gb: float, memory_gib: float, bf16: float, fp32: float, bandwidth: float, link: float, host: float
) -> DeviceSpecConfig:
    return DeviceSpecConfig(
        name=name,
        sold_gb=sold_gb,
        memory_gib=memory_gib,
        bf16_tflops=bf16,
        fp32_tflops=fp32,
        bandwidth_gb_s=bandwidth,
        link_gb_s=link,
        host_gb_s=host,
    )


DEVICES: dict[str, DeviceSpecConfig] = {
    #             name    sold    GiB   bf16   fp32  memory  link  host
    "h100": _spec("h100", 80, 79.1, 989.0, 67.0, 3350.0, 450.0, 55.0),
    "h200": _spec("h200", 141, 139.8, 989.0, 67.0, 4800.0, 450.0, 55.0),
    "a100": _spec("a100", 80, 79.1, 312.0, 19.5, 2039.0, 300.0, 25.0),
    "l40s": _spec("l40s", 48, 44.4, 362.0, 91.6, 864.0, 25.0, 25.0),
    "rtx4090": _spec("rtx4090", 24, 23.5, 165.0, 82.6, 1008.0, 25.0, 25.0),
    "cpu": _spec("cpu", 16, 16.0, 0.5, 0.5, 40.0, 10.0, 10.0),
}
"""The kinds that have a name. A `cpu` counts as one device; its memory is replaced by that of this machine where known."""


def _known(device: str | DeviceSpecConfig) -> str | DeviceSpecConfig:
    if isinstance(device, str) and device not in DEVICES:
        raise ValueError(
            f"no data sheet has this name: use one of {', '.join(DEVICES)}, or write the numbers, e.g. {{memory_gib: 24, "
            "bf16_tflops: 100, fp32_tflops: 50, bandwidth_gb_s: 900, link_gb_s: 25, host_gb_s: 25}"
        )
    return device


class EfficiencyConfig(Node):
    """The share of a device's peak that each kind of work is taken to reach, and what else the clock model assumes."""

    train: float = Field(default=0.4, gt=0, le=1)
    """Share of peak FLOP/s reached in training, forward and backward."""
    prefill: float = Field(default=0.5, gt=0, le=1)
    """Share of peak FLOP/s reached in prefill and in scoring without gradient."""
    decode: float = Field(default=0.6, gt=0, le=1)
    """Share of memory bandwidth reached in decoding."""
    link: float = Field(default=0.7, gt=0, le=1)
    """Share of its bandwidth that a link or network reaches."""
    memory: float = Field(default=0.92, gt=0, le=1)
    """Share of a device's memory that can be used; the rest is lost between blocks and to libraries."""
    length: float = Field(default=0.6, gt=0, le=1)
    """Mean length of prompts and completions, as a share of what the config allows. Memory is planned for the whole."""
    context: float = Field(default=1.0, gt=0, le=1)
    """How much of the longest context the running sequences of an engine fill at once. 1 is the worst case."""
    step_overhead_ms: float = Field(default=1.0, ge=0)
    """Time of a decoding step beyond its reads: sampling and launches."""


DeviceKind = Annotated[str | DeviceSpecConfig, Field(union_mode="left_to_right"), AfterValidator(_known)]


def _is_gpu(device: str | DeviceSpecConfig) -> str | DeviceSpecConfig:
    if device == "cpu":
        raise ValueError("list the nodes that have GPUs: of the others nothing needs to be known")
    return device


_MAX_NODES, _MAX_DEVICES = 100_000, 1_000
"""Of a cluster, and of a node: each is listed, and no cluster has as many."""


class NodeKindConfig(Node):
    """Equal nodes in a cluster that has others too."""

    device: Annotated[DeviceKind, AfterValidator(_is_gpu)]
    """A name as in `cluster.device`, or a data sheet."""
    num: int = Field(default=8, ge=1, le=_MAX_DEVICES)
    """Devices of one node."""
    count: int = Field(default=1, ge=1, le=_MAX_NODES)
    """Nodes of this kind."""
    labels: dict[str, str] = Field(default_factory=dict)
    """What they carry in Ray, so that `devices: {gpus: …, label: …}` finds them."""


class Machine(NamedTuple):
    """One node of the cluster."""

    spec: DeviceSpecConfig
    num: int
    labels: Mapping[str, str]


def _nodes_form(value: object) -> str:
    return "kinds" if isinstance(value, list) else "number"


Nodes = Annotated[
    Annotated[int, Field(ge=1, le=_MAX_NODES), Tag("number")]
    | Annotated[list[NodeKindConfig], Field(min_length=1), Tag("kinds")],
    Discriminator(_nodes_form),
]


class ClusterConfig(MachinesConfig):
    """Equal nodes with equal devices; or a list of the kinds of nodes there are."""

    kind: Literal["planned"] = "planned"

    device: DeviceKind = "h100"
    """h100, h200, a100, l40s, rtx4090 or cpu; or a data sheet of your own."""
    num: int = Field(default=8, ge=1, le=_MAX_DEVICES)
    """Devices of one node."""
    nodes: Nodes = 1
    """How many; or what kinds: `[{device: h200, num: 8, labels: {pool: train}}, {device: l40s, num: 4, count: 2}]`. Devices are
    numbered in this order."""
    network_gb_s: float = Field(default=50.0, gt=0)
    """Between two nodes, one way, all devices of a node together."""
    efficiency: EfficiencyConfig = Field(default_factory=EfficiencyConfig)

    @model_validator(mode="after")
    def _says_it_once(self) -> ClusterConfig:
        if isinstance(self.nodes, list) and {"device", "num"} & self.model_fields_set:
            raise ValueError("where nodes lists kinds, device and num belong into its entries: take them out beside it")
        return self

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Every node, in the order in which devices are numbered."""
        if isinstance(self.nodes, int):
            return (Machine(self.spec, self.num, {}),) * self.nodes
        return tuple(Machine(spec_of(kind.device), kind.num, kind.labels) for kind in self.nodes for _ in range(kind.count))

    @property
    def gpu_nodes(self) -> GpuNodes:
        """Every node as a selection of devices sees it."""
        if self.has_only_cpus:
            return GpuNodes()
        return GpuNodes(GpuNode(one.num, one.labels, one.spec.sold_gb or one.spec.memory_gib) for one in self.machines)

    @property
    def num_devices(self) -> int:
        return sum(machine.num for machine in self.machines)

    @property
    def devices_per_node(self) -> int:
        """Devices of the smallest node."""
        return min(machine.num for machine in self.machines)

    @property
    def is_mixed(self) -> bool:
        """Whether it matters which devices a role gets."""
        return isinstance(self.nodes, list) and len(self.nodes) > 1

    @property
    def spec(self) -> DeviceSpecConfig:
        """The device's data sheet; of several kinds, what all of them can do."""
        return spec_of(self.device) if isinstance(self.nodes, int) else weakest([machine.spec for machine in self.machines])

    @property
    def has_only_cpus(self) -> bool:
        return self.spec.name == "cpu"

    def node_of(self, device: str) -> int:
        """The node that a device is in; the CPU is the first's."""
        index = 0 if device == "cpu" else int(device)
        for node, machine in enumerate(self.machines):
            if index < machine.num:
                return node
            index -= machine.num
        raise ValueError(f"device {device} does not exist: the cluster has {self.num_devices}")

    def spec_of(self, device: str) -> DeviceSpecConfig:
        """A device's data sheet."""
        return self.spec if isinstance(self.nodes, int) else self.machines[self.node_of(device)].spec

    def memory_bytes_of(self, device: str) -> int:
        """What a device may hold before the plan calls it full."""
        return int(self.spec_of(device).memory_gib * 2**30 * self.efficiency.memory)

    def part(self, devices: Collection[str]) -> ClusterConfig:
        """The equal nodes that a role on these devices reckons with: it is as fast as the weakest of them."""
        if tuple(devices) == ("cpu",):
            return self.model_copy(update={"device": "cpu", "nodes": 1})
        if isinstance(self.nodes, int):
            return self
        machines = [self.machines[node] for node in sorted({self.node_of(device) for device in devices})]
        spec, num = weakest([machine.spec for machine in machines]), min(machine.num for machine in machines)
        return self.model_copy(update={"device": spec, "num": num, "nodes": len(machines)})


def spec_of(device: str | DeviceSpecConfig) -> DeviceSpecConfig:
    """The data sheet that a config names."""
    return device if isinstance(device, DeviceSpecConfig) else DEVICES[device]


def weakest(specs: Sequence[DeviceSpecConfig]) -> DeviceSpecConfig:
    """What all of these devices can do: the least of each number."""
    kinds = list(dict.fromkeys(specs))
    if len(kinds) == 1:
        return kinds[0]
    numbers = [name for name in DeviceSpecConfig.model_fields if name not in ("name", "sold_gb")]
    least = {name: min(getattr(spec, name) for spec in kinds) for name in numbers}
    return DeviceSpecConfig(name=" and ".join(spec.name for spec in kinds), **least)
