"""The answer at the end of an episode with tools, and whether it is right."""

from __future__ import annotations

from reroll.envs.actions import last_line, last_tagged
from reroll_zoo.math.number import WrittenNumber, read_number
from reroll_zoo.text.overlap import normal_words

ANSWER_TAG = "answer"
_MAX_NUMBER_CHARS = 1000
"""Longer numbers are taken for noise: converting them costs quadratic time."""
_RELATIVE_TOLERANCE = 1e-6


def final_answer(text: str) -> str:
    """What stands in the last `<answer>…</answer>`, or the last line if there is none."""
    tagged = last_tagged(text, ANSWER_TAG)
    return last_line(text) if tagged is None else tagged


def same_answer(said: str, expected: str) -> bool:
    """Equal numbers where both are numbers, else equal words."""
    return same_number(said, expected) if _number(expected) is not None else same_words(said, expected)


def same_number(said: str, expected: str) -> bool:
    """Whole numbers must be equal, however long; others to a millionth. `1,234`, `$5` and a full stop at the end are read."""
    given, wanted = _number(said), _number(expected)
    return given is not None and wanted is not None and wanted.equals(given, tolerance=_RELATIVE_TOLERANCE)


def same_words(said: str, expected: str) -> bool:
    """Equal without case, punctuation, articles and extra spaces."""
    return normal_words(said) == normal_words(expected)


def _number(text: str) -> WrittenNumber | None:
    text = text.strip().removesuffix(".").replace("$", "").strip()
    return read_number(text) if len(text) <= _MAX_NUMBER_CHARS else None
