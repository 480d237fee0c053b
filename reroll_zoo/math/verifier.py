"""Mathematical answers: the same value or formula as the reference, however it is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.reward_base import AnswerRewardConfig
from reroll.errors import RewardError
from reroll.rewards.base import extract, reference
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.math.algebra import Algebra
from reroll_zoo.math.answer import final_answer, last_boxed
from reroll_zoo.math.latex import is_reasonable, is_well_formed, key, tidy
from reroll_zoo.math.number import read_number
from reroll_zoo.math.parts import (
    Listing,
    in_radians,
    read_alternatives,
    read_column,
    read_listing,
    split_name,
    split_unit,
    without_brackets,
)

_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z' .-]*")
_MAX_PAIRS = 64
"""How many pairs of formulas of two lists are compared; items that are equal letter by letter or as numbers are free."""


class MathConfig(AnswerRewardConfig):
    r"""The final answer is the same mathematics as the reference: `\frac{1}{2}`, `1/2` and `0.5` are one answer."""

    runs: ClassVar[str] = "reroll_zoo.math.verifier:Math"
    packages: ClassVar[Mapping[str, str]] = {"math_verify": "reroll[math]"}
    in_process: ClassVar[bool] = True

    kind: Literal["math"] = "math"
    require_boxed: bool = False
    r"""Only what stands in `\boxed{}` counts; without, a text that boxes nothing is read for its last answer or number."""
    tolerance: float = Field(default=1e-6, ge=0)
    """How far, relative to the reference, a decimal may be off. Integers, fractions and roots must be equal exactly."""


class Math:
    """The final answer is the reference, decided in this order: letter by letter, as numbers, by structure, by algebra.

    Runs where it can be killed: what the guards let through may still keep sympy busy for long.
    """

    def __init__(self, config: MathConfig) -> None:
        self._config = config
        self._algebra = Algebra()

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        gold = self._gold(prompt)
        text = extract(trajectory.text, config.pattern)
        found = None if text is None else final_answer(text, require_boxed=config.require_boxed)
        given = tidy(found) if found and is_reasonable(found) else ""
        is_correct = self._is_same(gold, given)
        answer = key(gold) if is_correct else _one_writing(given) or None
        return Score(value=config.correct if is_correct else config.wrong, answer=answer)

    def _gold(self, prompt: Prompt) -> str:
        """The reference, tidied. One that is not for algebra is compared letter by letter; one that says nothing at all would
        score every answer wrong: it is the row's fault."""
        answer = reference(prompt)
        gold = last_boxed(answer) or answer.rpartition("####")[2]
        tidied = tidy(gold) if is_reasonable(gold) else ""
        if not tidied or not (is_well_formed(tidied) or self._is_readable(tidied)):
            raise RewardError(
                f"the reference answer of prompt {prompt.id} cannot be read as mathematics: {answer[:200]!r}. "
                "Correct the row, or use reward kind exact"
            )
        return tidied

    def _is_readable(self, text: str) -> bool:
        text = without_brackets(split_name(split_unit(text)[0])[1])
        if read_number(text) is not None or _WORDS.fullmatch(text):
            return True
        listing = read_listing(text)
        parts = read_alternatives(text) or (listing.items if listing else ())
        if parts:
            return all(self._is_readable(part) for part in parts)
        return self._algebra.read(text) is not None

    def _is_same(self, gold: str, given: str) -> bool:
        if not given:
            return False
        if (verdict := self._cheap_verdict(gold, given)) is not None:
            return verdict
        (gold, gold_unit), (given, given_unit) = split_unit(without_brackets(gold)), split_unit(without_brackets(given))
        if {gold_unit, given_unit} in ({"degree", ""}, {"degree", "radian"}) and r"\pi" in gold + given:
            gold, given = (in_radians(text, unit) for text, unit in ((gold, gold_unit), (given, given_unit)))
        elif gold_unit and given_unit and gold_unit != given_unit:
            return False
        if (verdict := self._cheap_verdict(gold, given)) is not None:
            return verdict
        if (verdict := self._verdict_by_parts(gold, given)) is not None:
            return verdict
        return self._is_same_named(gold, given)

    def _cheap_verdict(self, gold: str, given: str) -> bool | None:
        """Decided without sympy: the same letters, two numbers, or words on one side only. None: undecided."""
        if key(gold) == key(given):
            return True
        gold_number, given_number = read_number(gold), read_number(given)
        if gold_number is not None and given_number is not None:
            return gold_number.equals(given_number, tolerance=self._config.tolerance)
        if _WORDS.fullmatch(given) or _WORDS.fullmatch(gold):
            return False
        return None

    def _verdict_by_parts(self, gold: str, given: str) -> bool | None:
        """Unions and lists, part by part. None: at most one of the two has parts."""
        gold_union, given_union = read_alternatives(gold), read_alternatives(given)
        if gold_union is not None and given_union is not None:
            return self._are_same_sets(gold_union, given_union) or None
        if 0 < gold.count(":") != given.count(":") > 0:  # 2:3:5 is no 4:30.
            return False
        gold_list, given_list = read_listing(gold), read_listing(given)
        if (gold_list is None) != (given_list is None):  # A point may be written as a column.
            gold_list, given_list = gold_list or read_column(gold), given_list or read_column(given)
        if gold_list is None or given_list is None:
            return None
        return self._are_same_lists(gold_list, given_list)

    def _are_same_lists(self, gold: Listing, given: Listing) -> bool:
        kinds = {gold.kind, given.kind}
        if "bracketed" not in kinds:
            return self._are_same_sets(list(gold.items), list(given.items))
        # Two values in brackets may be an interval, whose ends matter; longer ones are tuples, and [1,2,3] is (1,2,3).
        if "set" in kinds or len(gold.items) != len(given.items):
            return False
        if kinds == {"bracketed"} and len(gold.items) == 2 and gold.ends != given.ends:
            return False
        return all(map(self._is_same, gold.items, given.items))

    def _are_same_sets(self, golds: list[str], givens: list[str]) -> bool:
        """Whether each item has its equal on the other side, in any order."""
        missing = [gold for gold in golds if not any(self._cheap_verdict(gold, given) for given in givens)]
        extra = [given for given in givens if not any(self._cheap_verdict(gold, given) for gold in golds)]
        if len(missing) * len(givens) + len(extra) * len(golds) > _MAX_PAIRS:
            return False
        return all(any(self._is_same(gold, given) for given in givens) for gold in missing) and all(
            any(self._is_same(gold, given) for gold in golds) for given in extra
        )

    def _is_same_named(self, gold: str, given: str) -> bool:
        """`x = 3` is 3, and is not `y = 3`."""
        (gold_name, gold_value), (given_name, given_value) = split_name(gold), split_name(given)
        is_named, is_equation = bool(gold_name), bool(given_name) or "=" in given
        if is_named and (gold_name == given_name or not is_equation):
            return self._is_same(gold_value, given_value)
        if is_equation and not is_named and "=" not in gold:
            return self._is_same(gold, given_value.rpartition("=")[2].strip())
        return self._is_same_formula(gold, given)

    def _is_same_formula(self, gold: str, given: str) -> bool:
        expected, received = self._algebra.readings(gold), self._algebra.readings(given)
        are_alike = len(expected) == len(received)  # Whoever writes \log twice means the same by it.
        pairs = zip(expected, received, strict=True) if are_alike else product(expected, received)
        return any(self._algebra.are_equal(*pair, tolerance=self._config.tolerance) for pair in pairs)


def _one_writing(tidied: str) -> str:
    """A wrong answer in one of its writings: the same for `0.5` and `1/2`, as far as can be told without algebra."""
    value = without_brackets(split_name(split_unit(tidied)[0])[1])
    number = read_number(value)
    return key(value) if number is None else str(number.value)
