"""Config nodes of rewards that are made of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from reroll.config.reward_base import CombinedRewardConfig, RewardConfig
from reroll.errors import Violation


class StackRewardConfig(CombinedRewardConfig):
    """Several rewards at once: their weighted sum. Each part is logged by its name, `outer.inner` where stacks are nested."""

    runs: ClassVar[str] = "reroll_zoo.combined.rewards:Stack"

    kind: Literal["stack"] = "stack"
    parts: dict[str, RewardConfig]
    """By any name; each counts by its `weight`."""
    clip: tuple[float, float] | None = None
    """The lowest and the highest sum."""

    @property
    def nested(self) -> dict[str, RewardConfig]:
        return {f"parts.{name}": part for name, part in self.parts.items()}

    @property
    def part_names(self) -> set[str] | None:
        return set(self.parts)

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        if not self.parts:
            yield Violation("parts", "is empty", "name at least one reward, e.g. answer: {kind: numeric}")
        for name in self.parts:
            if not name or any(mark in name for mark in "./ "):
                problem, fix = f"{name!r} cannot name a part", "parts are logged by name: use letters, digits, - and _"
                yield Violation("parts", problem, fix)
        if self.clip and self.clip[0] >= self.clip[1]:
            yield Violation("clip", f"{list(self.clip)} leaves no range", "give the lower bound first, e.g. [-1, 1]")


class CascadeRewardConfig(CombinedRewardConfig):
    """One judge after the other: the next is asked only about what the one before did not pass or could not judge."""

    runs: ClassVar[str] = "reroll_zoo.combined.rewards:Cascade"

    kind: Literal["cascade"] = "cascade"
    steps: list[RewardConfig]
    """Cheap ones first: a rule, then a judge. The last one asked has the say."""
    threshold: float = 1.0
    """An answer with at least this reward passes."""

    @property
    def nested(self) -> dict[str, RewardConfig]:
        return {f"steps.{index}": step for index, step in enumerate(self.steps)}

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        if len(self.steps) < 2:
            num_steps = "one step" if self.steps else "no steps"
            yield Violation("steps", f"a cascade with {num_steps} has nowhere to go", "add a step, or use the reward itself")
