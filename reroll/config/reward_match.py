"""Rewards that compare an answer with a reference, or with a form it must have."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.base import Pattern
from reroll.config.reward_base import ExtractingRewardConfig, InProcessRewardConfig


class ExactRewardConfig(ExtractingRewardConfig):
    """Equal to the reference answer after stripping spaces."""

    runs: ClassVar[str] = "reroll.rewards.match:Exact"

    kind: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without case."""


class NumericRewardConfig(ExtractingRewardConfig):
    """The last number in the text equals the reference number."""

    runs: ClassVar[str] = "reroll.rewards.match:Numeric"

    kind: Literal["numeric"] = "numeric"
    tolerance: float = Field(default=1e-6, ge=0)
    """How far off the number may be."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """How far off, as a part of the reference: 0.01 accepts 99 to 101 for 100. The wider of the two counts."""


class RegexRewardConfig(InProcessRewardConfig):
    """The text matches a regular expression: a format reward."""

    runs: ClassVar[str] = "reroll.rewards.match:Regex"

    kind: Literal["regex"] = "regex"
    pattern: Pattern
    """What to look for; start it with (?s) to let a dot cross lines, with (?i) to ignore case."""
    whole: bool = False
    """The pattern must match the whole text, spaces around it aside, and not only a part of it."""
    correct: float = 1.0
    """What a match earns."""
    wrong: float = 0.0
    """What any other text earns."""

    @property
    def verdict_on_hang(self) -> float | None:
        return self.wrong
