"""The state of a group between admission and training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from reroll.rollout.admission import AdmittedGroup
from reroll.types import Group, Prompt, Trajectory


@dataclass(slots=True, eq=False)
class GroupInFlight:
    """A group between admission and training: its samples' tasks, and the trajectories of those that ended."""

    admitted: AdmittedGroup[Prompt]
    admitted_s: float
    trajectories: list[Trajectory | None]
    num_left: int
    group_size: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    finished_s: float = 0.0
    ended: list[int] = field(default_factory=list)
    """Indices of usable siblings, in the order in which they ended."""
    is_stopped: bool = False
    has_baseline: bool = False
    """The last sample is the greedy one, whose reward is the group's baseline."""

    def sample_id(self, index: int) -> str:
        return f"{self.admitted.number}.{index}"

    @property
    def has_enough(self) -> bool:
        """Whether `group_size` siblings are usable, and the baseline sample, if there is one, has ended."""
        is_baseline_awaited = self.has_baseline and self.trajectories[-1] is None
        return not is_baseline_awaited and len(self.ended) >= self.group_size

    def group(self) -> Group:
        usable = [trajectory for trajectory in self.trajectories if trajectory and trajectory.is_usable]
        baseline = self.trajectories[-1] if self.has_baseline else None
        return Group(
            number=self.admitted.number,
            prompt=self.admitted.prompt,
            trajectories=tuple(trajectory for trajectory in usable if trajectory is not baseline),
            version=self.admitted.version,
            baseline=baseline.reward if baseline and baseline.is_usable else None,
        )

    def ended_samples(self) -> dict[int, Trajectory]:
        """The usable samples, by index."""
        return {index: one for index, one in enumerate(self.trajectories) if one is not None and one.is_usable}

    def whole(self) -> list[int]:
        """Indices of the samples that have not failed, ended or not."""
        return [index for index, one in enumerate(self.trajectories) if one is None or one.is_usable]
