"""Curricula as a config names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.data import CurriculumConfig
from reroll.errors import Violation


class MeasuringConfig(CurriculumConfig):
    """What curricula share: how well a prompt goes is the share of its group's samples that pass."""

    threshold: float = 1.0
    """A sample passes when its reward reaches this."""


class RememberingConfig(MeasuringConfig):
    """A curriculum that keeps a pass rate for every prompt."""

    ema_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in a prompt's pass rate, an exponential mean; 1 forgets all earlier ones."""


class FilterCurriculumConfig(RememberingConfig):
    """Pass over prompts that are too easy or too hard, and try them again now and then."""

    runs: ClassVar[str] = "reroll_zoo.curriculum.curricula:Filter"

    kind: Literal["filter"] = "filter"
    low: float = Field(default=0.05, ge=0, le=1)
    """Prompts that pass less often are too hard."""
    high: float = Field(default=0.95, ge=0, le=1)
    """Prompts that pass more often are too easy."""
    retry_epochs: int = Field(default=4, ge=1)
    """A prompt outside the range is tried again every so many epochs of its source."""

    def violations(self) -> Iterator[Violation]:
        if self.low > self.high:
            yield Violation("low", f"{self.low} is above high, {self.high}: no prompt fits", "set low below high")


class TargetCurriculumConfig(RememberingConfig):
    """Prefer prompts whose pass rate is near a target: each is drawn with a chance that falls with its distance."""

    runs: ClassVar[str] = "reroll_zoo.curriculum.curricula:Target"

    kind: Literal["target"] = "target"
    target: float = Field(default=0.5, ge=0, le=1)
    """The pass rate that is sought."""
    width: float = Field(default=0.2, gt=0)
    """At this distance from the target the chance is 0.61, at twice the distance 0.14: a bell curve."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The least chance, so that no prompt is given up for good. A prompt never tried has the chance 1."""


class LadderCurriculumConfig(MeasuringConfig):
    """Begin with each domain's lowest `level`; the next one joins when the highest open one goes well enough."""

    runs: ClassVar[str] = "reroll_zoo.curriculum.curricula:Ladder"
    uses_levels: ClassVar[bool] = True

    kind: Literal["ladder"] = "ladder"
    opens_at: float = Field(default=0.7, gt=0, le=1)
    """Mean pass rate of the highest open level at which the next one opens."""
    groups: int = Field(default=32, ge=1)
    """The mean is over so many of its latest groups; before there are as many, nothing opens."""
