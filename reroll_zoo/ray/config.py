"""The options of the ray runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.cluster import MachinesConfig
from reroll.config.parts import WatchedRuntimeConfig


class RayRuntimeConfig(WatchedRuntimeConfig):
    """Workers are Ray actors in placement groups."""

    runs: ClassVar[str] = "reroll_zoo.ray.runtime:RayRuntime"
    packages: ClassVar[Mapping[str, str]] = {"ray": "reroll[ray]"}
    spans_nodes: ClassVar[bool] = True

    kind: Literal["ray"]
    address: str | None = None
    """None starts Ray on this machine; `auto` or `host:port` joins a running cluster."""
    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs when starting Ray here; default: what the machine has, at least 4."""
    num_gpus: int | None = Field(default=None, ge=0)
    """Logical GPUs when starting Ray here, or the size of the cluster to check devices against."""

    def num_gpus_in(self, cluster: MachinesConfig | None, *, here: int) -> int | None:
        if self.num_gpus is not None:
            return self.num_gpus
        if cluster is not None:
            return 0 if cluster.has_only_cpus else cluster.num_devices
        return here if self.address is None else None
