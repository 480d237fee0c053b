"""One map of a run, worked out: what every device holds at its fullest, and how long a step takes, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reroll.config.host import num_visible_gpus
from reroll.config.pipeline import PipelineConfig
from reroll_zoo.plan.cluster import DEVICES, ClusterConfig, DeviceSpecConfig
from reroll_zoo.plan.here import gpu_names, host_memory_bytes
from reroll_zoo.plan.memory import GIB
from reroll_zoo.plan.peaks import DeviceLoad, loads_of
from reroll_zoo.plan.phases import Bar, bars_of
from reroll_zoo.plan.roles import Role, roles_of
from reroll_zoo.plan.shape import COUNTED
from reroll_zoo.ray.config import RayRuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a config comes to on a cluster."""

    config: PipelineConfig
    cluster: ClusterConfig
    roles: tuple[Role, ...]
    loads: tuple[DeviceLoad, ...]
    """One per device in use."""
    bars: tuple[Bar, ...]
    step_s: float
    notes: tuple[str, ...]
    """What the numbers leave open."""

    @property
    def overfull(self) -> tuple[DeviceLoad, ...]:
        """Devices that would hold too much. Of the hosts of GPUs nobody knows the memory: they are not judged."""
        judged = [load for load in self.loads if load.device != "cpu" or self.cluster.has_only_cpus]
        return tuple(load for load in judged if load.num_bytes > self.cluster.memory_bytes_of(load.device))

    @property
    def fits(self) -> bool:
        return not self.overfull

    @property
    def is_certain_to_overflow(self) -> bool:
        """Whether a device could not even hold what follows from the models' sizes alone."""
        return any(load.num_certain_bytes > self.cluster.memory_bytes_of(load.device) for load in self.overfull)

    @property
    def fullest(self) -> DeviceLoad:
        return max(self.loads, key=lambda load: load.num_bytes)

    def seconds(self, phase: str) -> float:
        """How long a phase takes in all."""
        return sum(bar.seconds for bar in self.bars if bar.phase == phase)


def make_plan(config: PipelineConfig, cluster: ClusterConfig) -> Plan:
    """Work out the map that the config names; `auto` devices are all there are.

    Raises ModelError for models whose sizes are not known, ConfigError for devices that the cluster does not have.
    """
    roles = roles_of(config, cluster)
    bars = bars_of(config, cluster, roles)
    return Plan(
        config=config,
        cluster=cluster,
        roles=tuple(roles),
        loads=loads_of(config, roles),
        bars=bars,
        step_s=max(bar.end_s for bar in bars),
        notes=tuple(_notes(roles, cluster)),
    )


def cluster_here(config: PipelineConfig) -> ClusterConfig | None:
    """The machines that a config will run on: those it names, else this one; None where its devices are not known.

    A cluster that is plainly `cpu` is this machine too, with the memory that it has.
    """
    if isinstance(config.cluster, ClusterConfig):
        return config.cluster.model_copy(update={"device": _cpu_here()}) if config.cluster.device == "cpu" else config.cluster
    num_gpus = num_visible_gpus()
    if isinstance(config.runtime, RayRuntimeConfig):
        if config.runtime.address is not None:
            return None
        num_gpus = num_gpus if config.runtime.num_gpus is None else config.runtime.num_gpus
    if not num_gpus:
        return ClusterConfig(device=_cpu_here(), num=1)
    names = [name.lower().replace(" ", "").replace("-", "") for name in gpu_names()]
    found = {kind for name in names for kind in DEVICES if kind in name and "40gb" not in name}
    return ClusterConfig(device=found.pop(), num=num_gpus) if len(found) == 1 else None


def _cpu_here() -> DeviceSpecConfig:
    memory, spec = host_memory_bytes(), DEVICES["cpu"]
    return spec.model_copy(update={"memory_gib": memory / GIB}) if memory else spec


def _notes(roles: Sequence[Role], cluster: ClusterConfig) -> Iterator[str]:
    for family in dict.fromkeys(role.shape.family for role in roles if role.shape.family not in COUNTED):
        yield f"models of family {family} are counted as a Llama of their sizes: their parameters may be somewhat off"
    if any("cpu" in role.devices for role in roles) and any(role.devices != ("cpu",) for role in roles):
        yield "what runs on the hosts' CPUs is not judged for memory, and timed as if alone there"
    for role in roles:
        if role.host:
            terms = " + ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in role.host.items())
            total = sum(role.host.values()) / GIB
            yield f"{role.name} keeps {terms} = {total:.1f} GiB in page-locked memory of its host (strategy.optimizer=host)"
        specs = {cluster.spec_of(device) for device in role.devices if device != "cpu"}
        if len(specs) > 1:
            yield f"{role.name} is on devices of several kinds, and is timed as if each were the weakest of them"
