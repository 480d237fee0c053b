"""Rewards that compare with a reference answer, or with a pattern. Cheap and pure, but for Regex."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.base import Pattern
from reroll.config.reward_base import AnswerRewardConfig, InProcessRewardConfig
from reroll.errors import RewardError
from reroll.rewards.base import extract, last_match, reference
from reroll.types import Prompt, Score, Trajectory

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A sign or a digit glued to a word or another number is not the start of one: `10-5` holds 10 and 5, `H2O` holds none.
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+−]?)\$?(?P<top>{_UNSIGNED})(?P<exponent>[eE][-+]?[0-9]{{1,3}})?(?:/(?P<bottom>{_UNSIGNED}))?"
)
_MAX_DIGITS = 400
"""Longer numbers are taken for noise: converting them costs quadratic time."""


class ExactRewardConfig(AnswerRewardConfig):
    """Equal to the reference answer after stripping spaces."""

    runs: ClassVar[str] = "reroll_zoo.text.match:Exact"

    kind: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without case."""


class NumericRewardConfig(AnswerRewardConfig):
    """The last number in the text equals the reference number."""

    runs: ClassVar[str] = "reroll_zoo.text.match:Numeric"

    kind: Literal["numeric"] = "numeric"
    tolerance: float = Field(default=1e-6, ge=0)
    """How far off the number may be."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """How far off, as a part of the reference: 0.01 accepts 99 to 101 for 100. The wider of the two counts."""


class RegexRewardConfig(InProcessRewardConfig):
    """The text matches a regular expression: a format reward."""

    runs: ClassVar[str] = "reroll_zoo.text.match:Regex"

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
    def score_on_timeout(self) -> float | None:
        return self.wrong


class Exact:
    """Equal to the reference answer after stripping spaces."""

    def __init__(self, config: ExactRewardConfig) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        expected, given = reference(prompt).strip(), extract(trajectory.text, config.pattern)
        if given is None:
            return Score(value=config.wrong)
        given = given.strip()
        if config.ignore_case:
            expected, given = expected.casefold(), given.casefold()
        return Score(value=config.correct if given == expected else config.wrong, answer=given)


class Numeric:
    """The last number in the text equals the reference number. Exact arithmetic: no digit is lost however long the number."""

    def __init__(self, config: NumericRewardConfig) -> None:
        self._config = config
        self._tolerance = Fraction(repr(config.tolerance))
        self._relative_tolerance = Fraction(repr(config.relative_tolerance))

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        answer = reference(prompt)
        expected = last_number(answer)
        if expected is None:
            raise RewardError(f"the reference answer of prompt {prompt.id} holds no number: {answer!r}. Use reward kind exact")
        text = extract(trajectory.text, config.pattern)
        given = None if text is None else last_number(text)
        tolerance = max(self._tolerance, self._relative_tolerance * abs(expected))
        is_correct = given is not None and abs(given - expected) <= tolerance
        return Score(value=config.correct if is_correct else config.wrong, answer=None if given is None else str(given))


class Regex:
    """The text matches a pattern. The pattern is the user's and may take for ever: runs where it can be killed."""

    def __init__(self, config: RegexRewardConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern)

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config, text = self._config, trajectory.text
        found = self._pattern.fullmatch(text.strip()) if config.whole else self._pattern.search(text)
        return Score(value=config.wrong if found is None else config.correct)


def last_number(text: str) -> Fraction | None:
    """The last number written in a text: `-1,234.5`, `$3`, `50%` (read as 50), `6.02e23`, `3/4`. None if there is none."""
    last = last_match(_NUMBER, text)
    if last is None or len(last[0]) > _MAX_DIGITS:
        return None
    top = Fraction(last["top"].replace(",", "") + (last["exponent"] or ""))
    bottom = Fraction(last["bottom"].replace(",", "")) if last["bottom"] else Fraction(1)
    if not bottom:
        return None
    return -top / bottom if last["sign"] in ("-", "−") else top / bottom
