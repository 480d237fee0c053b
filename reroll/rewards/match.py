"""Rewards that compare with a reference answer, or with a pattern. Cheap and pure, but for Regex."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from reroll.config.reward_match import ExactRewardConfig, NumericRewardConfig, RegexRewardConfig
from reroll.errors import RewardError
from reroll.types import Prompt, Score, Trajectory

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A sign or a digit glued to a word or another number is not the start of one: `10-5` holds 10 and 5, `H2O` holds none.
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+−]?)\$?(?P<top>{_UNSIGNED})(?P<exponent>[eE][-+]?[0-9]{{1,3}})?(?:/(?P<bottom>{_UNSIGNED}))?"
)
_MAX_DIGITS = 400
"""Longer numbers are taken for noise: converting them costs quadratic time."""


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


def reference(prompt: Prompt) -> str:
    """The reference answer, which these rewards cannot do without."""
    if prompt.answer is None:
        raise RewardError(f"prompt {prompt.id} has no reference answer: set answer_key of its source, or use another reward")
    return prompt.answer


def extract(text: str, pattern: str | None) -> str | None:
    """The answer in a text: the first group (or all) of the pattern's last match; all of the text without a pattern."""
    if pattern is None:
        return text
    last = _last_match(re.compile(pattern), text)
    if last is None:
        return None
    return last[1] if last.re.groups else last[0]


def last_number(text: str) -> Fraction | None:
    """The last number written in a text: `-1,234.5`, `$3`, `50%` (read as 50), `6.02e23`, `3/4`. None if there is none."""
    last = _last_match(_NUMBER, text)
    if last is None or len(last[0]) > _MAX_DIGITS:
        return None
    top = Fraction(last["top"].replace(",", "") + (last["exponent"] or ""))
    bottom = Fraction(last["bottom"].replace(",", "")) if last["bottom"] else Fraction(1)
    if not bottom:
        return None
    return -top / bottom if last["sign"] in ("-", "−") else top / bottom


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    kept = deque(pattern.finditer(text), maxlen=1)
    return kept[0] if kept else None
