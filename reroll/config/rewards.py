"""How answers are judged."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from reroll.config.base import Node


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


class Extracting(Node):
    """What rewards that compare with a reference answer share."""

    pattern: Pattern | None = None
    """A regular expression whose first group (or whole match) is the answer; the last match counts. Default: the whole text."""
    correct: float = 1.0
    wrong: float = 0.0


class ExactReward(Extracting):
    """Equal to the reference answer after stripping spaces."""

    kind: Literal["exact"]
    ignore_case: bool = False


class NumericReward(Extracting):
    """The last number in the text equals the reference number."""

    kind: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0)


class ReasoningGymReward(Node):
    """The verifier of the reasoning-gym task that the prompt came from."""

    kind: Literal["reasoning_gym"]
    pattern: Pattern | None = None
    """As in the other kinds: what part of the text is the answer."""
    timeout_s: float = Field(default=10.0, gt=0)


class ImportReward(Node):
    """Your own function: `(prompt, trajectory, **options) -> float | Score`, plain or async, run in worker processes."""

    kind: Literal["import"]
    path: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer is killed and its sample fails."""


RewardConfig = Annotated[ExactReward | NumericReward | ReasoningGymReward | ImportReward, Field(discriminator="kind")]
