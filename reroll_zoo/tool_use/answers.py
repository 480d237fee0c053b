"""The answer at the end of an episode with tools, and whether it is right."""

from __future__ import annotations

import math
import re
import string

from reroll.envs.actions import last_line, last_tagged

ANSWER_TAG = "answer"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
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
    first, second = _number(said), _number(expected)
    if first is None or second is None:
        return False
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    try:
        return math.isclose(first, second, rel_tol=_RELATIVE_TOLERANCE)
    except OverflowError:  # A whole number that no float can hold.
        return False


def same_words(said: str, expected: str) -> bool:
    """Equal without case, punctuation, articles and extra spaces."""
    return _normalised(said) == _normalised(expected)


def _number(text: str) -> int | float | None:
    text = text.strip().removesuffix(".").replace(",", "").replace("$", "").replace("_", " ").strip()
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number if math.isfinite(number) else None


def _normalised(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION)).split())
