"""The machines a run is planned and checked for, as far as a config's rules and its runtime ask about them."""

from __future__ import annotations

from typing import ClassVar

from reroll.config.host import SelectableNodes
from reroll.config.registry import KindConfig


class MachinesConfig(KindConfig):
    """Nodes and their devices. Kinds are found by their entry points, group `reroll.clusters`; one that names none is
    `planned`."""

    group: ClassVar[str] = "reroll.clusters"
    default_kind: ClassVar[str | None] = "planned"

    @property
    def gpu_nodes(self) -> SelectableNodes:
        """Every node as a selection of devices sees it."""
        raise NotImplementedError

    @property
    def num_devices(self) -> int:
        raise NotImplementedError

    @property
    def is_mixed(self) -> bool:
        """Whether it matters which devices a role gets."""
        raise NotImplementedError

    @property
    def has_only_cpus(self) -> bool:
        raise NotImplementedError
