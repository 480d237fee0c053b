"""The machines a run is planned for: what each kind of device can do, and how much of that a run is taken to reach.

Every number that the planner assumes stands here, and every one can be set from YAML under `cluster`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from reroll.config.base import Node


class DeviceSpec(Node):
    """One device, by its data sheet."""

    name: str = "device"
    memory_gib: float = Field(gt=0)
    """What a program may use of it."""
    bf16_tflops: float = Field(gt=0)
    """Dense, without sparsity."""
    fp32_tflops: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    """Of its memory."""
    link_gb_s: float = Field(gt=0)
    """To the other devices of its node, one way."""
    host_gb_s: float = Field(gt=0)
    """To the memory of its host, one way."""


def _spec(name: str, memory_gib: float, bf16: float, fp32: float, bandwidth: float, link: float, host: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_gib=memory_gib,
        bf16_tflops=bf16,
        fp32_tflops=fp32,
        bandwidth_gb_s=bandwidth,
        link_gb_s=link,
        host_gb_s=host,
    )


DEVICES: dict[str, DeviceSpec] = {
    #             name      GiB   bf16   fp32  memory  link  host
    "h100": _spec("h100", 79.1, 989.0, 67.0, 3350.0, 450.0, 55.0),
    "h200": _spec("h200", 139.8, 989.0, 67.0, 4800.0, 450.0, 55.0),
    "a100": _spec("a100", 79.1, 312.0, 19.5, 2039.0, 300.0, 25.0),
    "l40s": _spec("l40s", 44.4, 362.0, 91.6, 864.0, 25.0, 25.0),
    "rtx4090": _spec("rtx4090", 23.5, 165.0, 82.6, 1008.0, 25.0, 25.0),
    "cpu": _spec("cpu", 16.0, 0.5, 0.5, 40.0, 10.0, 10.0),
}
"""The kinds that have a name. A `cpu` counts as one device; its memory is replaced by that of this machine where known."""


def _known(device: str | DeviceSpec) -> str | DeviceSpec:
    if isinstance(device, str) and device not in DEVICES:
        raise ValueError(
            f"no data sheet has this name: use one of {', '.join(DEVICES)}, or write the numbers, e.g. {{memory_gib: 24, "
            "bf16_tflops: 100, fp32_tflops: 50, bandwidth_gb_s: 900, link_gb_s: 25, host_gb_s: 25}"
        )
    return device


class Efficiency(Node):
    """The share of a device's peak that each kind of work is taken to reach, and what else the clock model assumes."""

    train: float = Field(default=0.4, gt=0, le=1)
    """Of peak FLOP/s, forward and backward."""
    prefill: float = Field(default=0.5, gt=0, le=1)
    """Of peak FLOP/s, reading prompts and scoring without gradient."""
    decode: float = Field(default=0.6, gt=0, le=1)
    """Of memory bandwidth, writing tokens."""
    link: float = Field(default=0.7, gt=0, le=1)
    """Of every link and network."""
    memory: float = Field(default=0.92, gt=0, le=1)
    """Of a device's memory; the rest is lost between blocks and to libraries."""
    length: float = Field(default=0.6, gt=0, le=1)
    """Mean length of prompts and completions, as a share of what the config allows. Memory is planned for the whole."""
    context: float = Field(default=1.0, gt=0, le=1)
    """How much of the longest context the running sequences of an engine fill at once. 1 is the worst case."""
    step_overhead_ms: float = Field(default=1.0, ge=0)
    """Of a decoding step beyond its reads: sampling and launches."""


class ClusterConfig(Node):
    """Equal nodes with equal devices."""

    device: Annotated[str | DeviceSpec, Field(union_mode="left_to_right"), AfterValidator(_known)] = "h100"
    """h100, h200, a100, l40s, rtx4090 or cpu; or a data sheet of your own."""
    num: int = Field(default=8, ge=1)
    """Devices of one node."""
    nodes: int = Field(default=1, ge=1)
    network_gb_s: float = Field(default=50.0, gt=0)
    """Between two nodes, one way, all devices of a node together."""
    efficiency: Efficiency = Field(default_factory=Efficiency)

    @property
    def num_devices(self) -> int:
        return self.num * self.nodes

    @property
    def spec(self) -> DeviceSpec:
        """The device's data sheet."""
        return self.device if isinstance(self.device, DeviceSpec) else DEVICES[self.device]

    @property
    def has_only_cpus(self) -> bool:
        return self.spec.name == "cpu"

    @property
    def memory_bytes(self) -> int:
        """What one device may hold before the plan calls it full."""
        return int(self.spec.memory_gib * 2**30 * self.efficiency.memory)
