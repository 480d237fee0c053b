"""Rewards for answers in words: overlap with a reference, a reference within. Cheap and pure."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.reward_base import AnswerRewardConfig
from reroll.errors import RewardError
from reroll.rewards.base import extract
from reroll.types import Prompt, Score, Trajectory

_ARTICLES = frozenset({"a", "an", "the"})


class F1Config(AnswerRewardConfig):
    """Word overlap with the best of the references, as SQuAD measures it: lower case, no articles, no punctuation."""

    runs: ClassVar[str] = "reroll_zoo.text.overlap:F1"

    kind: Literal["f1"] = "f1"
    answers_key: str = "answers"
    """The row's column with more references; the reference answer itself may also be a JSON list."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """From this F1 on an answer is correct and below it wrong; null: the score runs from wrong to correct with F1."""


class SubstringConfig(AnswerRewardConfig):
    """The reference, or one of several, stands in the text: case, articles and punctuation aside, and in whole words."""

    runs: ClassVar[str] = "reroll_zoo.text.overlap:Substring"

    kind: Literal["substring"] = "substring"
    answers_key: str = "answers"
    """The row's column with more references; the reference answer itself may also be a JSON list."""
    max_words: int | None = Field(default=None, ge=1)
    """Longer answers are wrong, so that naming everything does not pay; null: no limit."""


class F1:
    """Word overlap with the best of several references, as SQuAD measures it."""

    def __init__(self, config: F1Config) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        expected = [normal_words(answer) for answer in references(prompt, answers_key=config.answers_key)]
        given = normal_words(extract(trajectory.text, config.pattern) or "")
        best = max(overlap_f1(words, given) for words in expected)
        is_exact = given in expected
        share = best if config.threshold is None else float(best >= config.threshold)
        value = config.wrong + share * (config.correct - config.wrong)
        return Score(value=value, info={"f1": best, "exact": float(is_exact)}, answer=" ".join(given) or None)


class Substring:
    """The words of a reference stand in the answer, one after the other."""

    def __init__(self, config: SubstringConfig) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        expected = [normal_words(answer) for answer in references(prompt, answers_key=config.answers_key)]
        given = normal_words(extract(trajectory.text, config.pattern) or "")
        is_short = config.max_words is None or len(given) <= config.max_words
        is_correct = is_short and any(_holds(given, words) for words in expected)
        return Score(value=config.correct if is_correct else config.wrong, answer=" ".join(given) or None)


def references(prompt: Prompt, *, answers_key: str) -> list[str]:
    """Every reference of a row: its answer, which may be a JSON list of them, and those in its `answers_key` column."""
    answers = [*_listed(prompt.answer), *_listed(prompt.extra.get(answers_key))]
    kept = [answer for answer in answers if normal_words(answer)]
    if not kept:
        raise RewardError(
            f"prompt {prompt.id} has no reference answer: set answer_key of its source, or add a column {answers_key!r}"
        )
    return kept


def normal_words(text: str) -> list[str]:
    """The words that count: lower case, without punctuation and articles. Articles stay where there is nothing else."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(" " if character in "-–—/" else character for character in plain if not _is_mark(character))
    words = kept.split()
    return [word for word in words if word not in _ARTICLES] or words


def overlap_f1(expected: list[str], given: list[str]) -> float:
    """Harmonic mean of the shares of words that both sides have, each word as often as it occurs."""
    num_shared = (Counter(expected) & Counter(given)).total()
    return 2 * num_shared / (len(expected) + len(given)) if num_shared else 0.0


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("P") and character not in "-–—/"


def _listed(value: object) -> list[str]:
    """A reference or a list of them, which may also be written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [str(value)]
    if value is None:
        return []
    return [str(answer) for answer in value] if isinstance(value, list | tuple) else [str(value)]


def _holds(words: list[str], wanted: list[str]) -> bool:
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words) - len(wanted) + 1))
