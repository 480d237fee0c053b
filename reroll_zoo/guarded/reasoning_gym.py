"""reasoning-gym's scorers. Rewards and environments ask them here, and nowhere else.

Some of them run what they are given, by `eval` or by sympy's parser, which is `eval` in disguise. An answer that would be run
is scored in the sandbox, in a process of its own; all others are scored here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import reasoning_gym

from reroll_zoo.guarded.contained import ContainedScorer
from reroll_zoo.guarded.watch import AuditWatch
from reroll_zoo.sandbox.config import LocalSandboxConfig

_ARITHMETIC = re.compile(r"(?:[0-9\s+/().-]|\*(?!\*)){0,1000}")
_POLYNOMIAL = re.compile(
    r"(?:[0-9]{1,20}(?:\.[0-9]{1,20})?|[A-Za-z](?:\*\*[0-9]{1,2}(?![0-9]))?(?![A-Za-z0-9(])|[\s+/-]|\*(?!\*)){0,500}"
)
_WORD = re.compile(r"[A-Za-z]{0,1000}")
_SCORER = """
import reasoning_gym
generator = reasoning_gym.create_dataset(name, **options)
def score(given):
    return generator.score_answer(given, entry)
"""


class TaskScorer:
    """Scores answers to tasks of any generator. Safe to use from many threads."""

    def __init__(self, sandbox: LocalSandboxConfig, *, wall_s: float, memory_mb: int) -> None:
        """`wall_s` and `memory_mb`: what an answer that must be run may use. Raises SandboxError if nothing contains it."""
        self._contained = ContainedScorer(_SCORER, module="reasoning_gym", sandbox=sandbox, wall_s=wall_s, memory_mb=memory_mb)
        self._generators: dict[str, Any] = {}

    def score(self, name: str, options: Mapping[str, Any], entry: Mapping[str, Any], given: str | None) -> float:
        """What the generator's scorer pays, between 0 and 1; 0 for an answer that it trips over.

        Raises SandboxError if the sandbox does not work.
        """
        if name in _MENDED and (given is None or not _MENDED[name](given.strip(), entry)):
            return 0.0
        generator = self._generator(name, options)
        if given is None or _is_plain(given):
            return _score(generator, given, entry)
        with AuditWatch() as watch:
            value = _score(generator, given, entry)
        if watch.refused is None:
            return value
        task = {"name": name, "options": dict(options), "entry": dict(entry)}
        return self._contained.score(task, given, reference=str(entry["answer"]))

    def _generator(self, name: str, options: Mapping[str, Any]) -> Any:
        key = repr((name, options))
        if key not in self._generators:
            self._generators[key] = reasoning_gym.create_dataset(name, **options)
        return self._generators[key]


def _score(generator: Any, given: str | None, entry: Mapping[str, Any]) -> float:
    try:
        value = float(generator.score_answer(given, entry))
    except Exception:  # Some scorers trip over answers they did not expect: those answers are wrong.
        return 0.0
    return value if math.isfinite(value) else 0.0


def _is_plain(given: str) -> bool:
    """Whether running it does no more than to calculate a little: a name alone does nothing, and without names nothing is done.

    Powers of numbers, products of sums and of lists could take all time and memory.
    """
    return any(form.fullmatch(given) for form in (_ARITHMETIC, _POLYNOMIAL, _WORD))


def _is_probability(given: str, entry: Mapping[str, Any]) -> bool:
    """Whether it is the expected one to a ten-thousandth, and no less than to a hundredth of its size."""
    if len(given) > 100 or "e" in given.casefold():  # 1e999999999 would be written out.
        return False
    try:
        value, expected = Fraction(given.replace(",", "")), Fraction(entry["answer"].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False
    return abs(value - expected) <= min(Fraction(1, 10_000), abs(expected) / 100)


_MENDED: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "game_of_life_halting": lambda given, entry: given.casefold() == str(entry["answer"]).casefold(),
    "coin_flip": _is_probability,
    "complex_arithmetic": lambda given, _: "nan" not in given.casefold() and "inf" not in given.casefold(),
}
"""What an answer must be before it is scored, where the scorer pays in full for any words, for the first digits, for `nan`."""
