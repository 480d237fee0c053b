"""Comparing what a program gave with what was expected, outside the sandbox, on plain values alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from reroll_zoo.code.sandboxed.wire import decode

_NOISE = 1e-12
"""What is left of zero after arithmetic with floats."""


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
    """How far a number may be from an expected one that is not whole, absolutely or relative to it. A whole number was not
    rounded to so many places: it must be that near relative to what is expected."""
    loose: bool
    """Whether to compare as JSON would: a tuple equals a list, a key that is a number equals its text."""

    def same(self, expected: Any, given: Any) -> bool:
        """Whether `given` is what was expected. Never raises, whatever a program gave."""
        if isinstance(expected, float):
            return _is_number(given) and _is_near(expected, given, isinstance(given, int), self.tolerance)
        if isinstance(expected, list | tuple):
            kinds = (list, tuple) if self.loose else type(expected)
            return isinstance(given, kinds) and len(given) == len(expected) and all(map(self.same, expected, given))
        if isinstance(expected, Mapping):
            return isinstance(given, Mapping) and self._same_items(expected, given)
        if isinstance(expected, set | frozenset):
            return isinstance(given, frozenset) and len(given) == len(expected) and self._same_members(expected, given)
        return bool(expected == given)

    def _same_items(self, expected: Mapping[Any, Any], given: Mapping[Any, Any]) -> bool:
        if len(given) != len(expected):
            return False
        if self.loose and all(isinstance(key, str) for key in expected):
            given = {_key_text(key): item for key, item in given.items()}
        return all(key in given and self.same(item, given[key]) for key, item in expected.items())

    def _same_members(self, expected: Set[Any], given: Set[Any]) -> bool:
        """Whether each member has one of its own on the other side. Numbers that are only near each other pair up by size."""
        wanted, got = expected - given, given - expected
        if not all(map(_is_number, wanted | got)):
            return False
        return all(map(self.same, sorted(wanted, key=_by_size), sorted(got, key=_by_size)))


def _key_text(key: Any) -> Any:
    """A key as JSON would write it; the key itself where it has more digits than Python writes out."""
    try:
        return str(key)
    except ValueError:
        return key


def _by_size(number: float) -> tuple[bool, float]:
    """NaN, which no order has a place for, comes last."""
    return (True, 0.0) if number != number else (False, number)


def _is_near(expected: float, given: Any, is_whole: bool, tolerance: float) -> bool:
    is_exact = is_whole and abs(expected) > _NOISE
    return is_close(expected, given, rel=tolerance, abs_=0.0 if is_exact else tolerance)


def is_close(expected: Any, given: Any, *, rel: float, abs_: float) -> bool:
    """Whether two numbers are equal or near each other; NaN is near NaN only."""
    try:
        if math.isnan(expected) or math.isnan(given):
            return math.isnan(expected) and math.isnan(given)
        return math.isclose(expected, given, rel_tol=rel, abs_tol=abs_)
    except (OverflowError, TypeError):
        return False


def same_output(expected: str, given: str, *, tolerance: float) -> bool:
    """Whether two printed texts are the same, word by word in each line. How words are spaced and lines indented does not
    count, since what data sets expect has often lost it, nor do blank lines around the texts."""
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
    is_whole = given.lstrip("+-").isdigit()
    try:
        return math.isfinite(float(given)) and _is_near(float(expected), float(given), is_whole, tolerance)
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal)


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
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return Reply(crashed=True)
