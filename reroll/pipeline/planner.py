"""The planner's seam: it puts devices in the place of `auto`, and tells beforehand what will not fit them.

It is a module or object under the entry point `planner` of the group `reroll.plan`. Where none is installed, `auto` is all the
GPUs that there are, and memory is judged by nobody.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from reroll.config.pipeline import PipelineConfig
from reroll.config.registry import load_entry
from reroll.errors import Violation

C = TypeVar("C", bound=PipelineConfig)


class Planner(Protocol):
    """Reckons with a cluster that a config describes, or with this machine. Loads no model."""

    def assign_devices(self, config: C, *, num_gpus: int) -> C:
        """The config with a map, and a place for optimizers, where it says `auto`. Unknown models are left alone."""

    def memory_violations(self, config: PipelineConfig) -> tuple[list[Violation], list[str]]:
        """Devices that cannot hold the config's models and their optimizers; and notes on those that may be too small for what
        comes on top. What is not known of the devices is let pass."""


def assign_devices(config: C, *, num_gpus: int) -> C:
    """The config with the planner's map in the place of `auto`."""
    planner = _planner()
    return planner.assign_devices(config, num_gpus=num_gpus) if planner else config


def memory_violations(config: PipelineConfig) -> tuple[list[Violation], list[str]]:
    """What will not fit the devices, and notes on what may not."""
    planner = _planner()
    return planner.memory_violations(config) if planner else ([], [])


def _planner() -> Planner | None:
    found: Planner | None = load_entry("reroll.plan", "planner")
    return found
