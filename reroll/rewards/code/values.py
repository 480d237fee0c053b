"""Comparing what a program gave with what was expected, outside the sandbox, on plain values alone."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from reroll.rewards.code.sandboxed.wire import decode


class Opaque:
    """A value that is not made of Python's plain types: equal to nothing."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one question to a program."""

    value: Any = None
    is_true: bool = False
    """Whether Python takes the value for true."""
    crashed: bool = False
    """It raised, or ran past its time: there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """When two values count as the same."""

    tolerance: float
    """How far a number may be from an expected one that is not whole, absolutely or relative to it."""
    loose: bool
    """Whether to compare as JSON would: a tuple equals a list, a key that is a number equals its text."""

    def same(self, expected: Any, given: Any) -> bool:
        """Whether `given` is what was expected. Never raises, whatever a program gave."""
        if isinstance(expected, float):
            return _is_number(given) and is_close(expected, given, rel=self.tolerance, abs_=self.tolerance)
        if isinstance(expected, list | tuple):
            kinds = (list, tuple) if self.loose else type(expected)
            return isinstance(given, kinds) and len(given) == len(expected) and all(map(self.same, expected, given))
        if isinstance(expected, Mapping):
            return isinstance(given, Mapping) and self._same_items(expected, given)
        if isinstance(expected, set | frozenset):
            return isinstance(given, frozenset) and len(given) == len(expected) and all(self._holds(expected, x) for x in given)
        return bool(expected == given)

    def _same_items(self, expected: Mapping[Any, Any], given: Mapping[Any, Any]) -> bool:
        if self.loose and all(isinstance(key, str) for key in expected):
            given = {str(key): item for key, item in given.items()}
        return len(given) == len(expected) and all(
            key in given and self.same(item, given[key]) for key, item in expected.items()
        )

    def _holds(self, expected: Collection[Any], given: Any) -> bool:
        return given in expected or any(self.same(item, given) for item in expected if isinstance(item, float))


def is_close(expected: Any, given: Any, *, rel: float, abs_: float) -> bool:
    """Whether two numbers are equal or near each other; NaN is near NaN only."""
    try:
        if math.isnan(expected) or math.isnan(given):
            return math.isnan(expected) and math.isnan(given)
        return math.isclose(expected, given, rel_tol=rel, abs_tol=abs_)
    except (OverflowError, TypeError):
        return False


def same_output(expected: str, given: str, *, tolerance: float) -> bool:
    """Whether two printed texts are the same, word by word in each line. Blank lines around them do not count."""
    expected_lines, given_lines = expected.strip().splitlines(), given.strip().splitlines()
    return len(expected_lines) == len(given_lines) and all(
        _same_line(wanted.split(), got.split(), tolerance) for wanted, got in zip(expected_lines, given_lines, strict=True)
    )


def _same_line(expected: list[str], given: list[str], tolerance: float) -> bool:
    return expected == given or (
        len(expected) == len(given)
        and all(wanted == got or _same_number(wanted, got, tolerance) for wanted, got in zip(expected, given, strict=True))
    )


def _same_number(expected: str, given: str, tolerance: float) -> bool:
    """Whether both are numbers and near each other; whole numbers must be written alike."""
    if expected.lstrip("+-").isdigit():
        return False
    try:
        return math.isfinite(float(given)) and is_close(float(expected), float(given), rel=tolerance, abs_=tolerance)
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def read_replies(stdout: str, *, token: str = "") -> list[dict[str, Any]]:
    """The lines that a driver wrote, up to the first that is none of its own."""
    replies: list[dict[str, Any]] = []
    for line in stdout.split("\n"):
        try:
            reply = json.loads(line.removeprefix(token)) if line.startswith(token) else None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            break
        replies.append(reply)
    return replies


def as_reply(line: Mapping[str, Any]) -> Reply:
    """One answer of the driver, as a value. What no driver would write counts as a crash."""
    if "value" not in line:
        return Reply(crashed=True)
    try:
        return Reply(value=decode(line["value"], lambda *_: Opaque()), is_true=line.get("true") is True)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Reply(crashed=True)
