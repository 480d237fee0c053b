"""From seed to tasks. Tests catch what a small model gets wrong: another constant, and one answer for everything."""

from __future__ import annotations

import hashlib
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from reroll.errors import DataError
from reroll_zoo.code_tasks import level_1, level_2, level_3
from reroll_zoo.code_tasks.config import CodeTasksConfig
from reroll_zoo.code_tasks.family import FUNCTIONS, PARAMETERS, Constants, Family

LEVELS: Mapping[int, tuple[Family, ...]] = {1: level_1.FAMILIES, 2: level_2.FAMILIES, 3: level_3.FAMILIES}
HELD_OUT_SHARE = 0.25
"""Of all tasks that there are."""
MAX_TRIES = 2000
"""Draws in a row that give nothing new before the families count as exhausted."""
MAX_TEST_DRAWS = 20
"""Sets of tests tried for one task before other constants are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """One task: what is asked, what solves it, and how that is tested."""

    family: str
    text: str
    solution: str
    function: str
    calls: tuple[Mapping[str, Any], ...]


def code_rows(config: CodeTasksConfig) -> Iterator[dict[str, Any]]:
    """The tasks of a source: `prompt`, `answer` (the solution in a fence), `tests`, `family`. Equal sources give equal tasks.

    Raises DataError if there are not as many different ones as asked for.
    """
    for task in draw_tasks(config):
        tests = {"function": task.function, "calls": list(task.calls)}
        yield {"prompt": task.text, "answer": f"```python\n{task.solution}\n```", "tests": tests, "family": task.family}


def draw_tasks(config: CodeTasksConfig) -> Iterator[CodeTask]:
    """As many different tasks as the source asks for. Errors are those of `code_rows`."""
    families = _families(config)
    rng = random.Random(f"{config.seed}/{config.split}")
    seen: set[str] = set()
    for number in range(config.size):
        for _ in range(MAX_TRIES):
            task = draw_task(rng, rng.choice(families), split=config.split, num_tests=config.num_tests)
            if task and task.text not in seen:
                break
        else:
            fix = "lower `size`, or add levels or families"
            raise DataError(f"code_tasks: only {number} different tasks were found of {config.size} asked for ({fix})")
        seen.add(task.text)
        yield task


def draw_task(rng: random.Random, family: Family, *, split: str, num_tests: int) -> CodeTask | None:
    """One task of the family; None if what was drawn belongs to the other split, or no tests tell it from its neighbours."""
    constants = {name: rng.choice(choices) for name, choices in family.constants.items()}
    function = rng.choice((family.name, *FUNCTIONS))
    place = rng.randrange(60)
    names = {role: PARAMETERS[role][place % len(PARAMETERS[role])] for role in family.roles}
    gaps = {**names, **constants}
    signature = f"{function}({', '.join(names.values())})"
    says = rng.choice(family.says).format(**{**gaps, **{role: f"`{name}`" for role, name in names.items()}})
    text = f"Write a Python function `{signature}` that {says}. Answer with one code block."
    # By constants where there are any, so that a held-out task is more than a training task in other words.
    if _split_of(f"{family.name} {constants}" if constants else text) != split:
        return None
    calls = _draw_calls(rng, family, constants, num_tests=num_tests)
    if calls is None:
        return None
    solution = f"def {signature}:\n" + textwrap.indent(family.body.format(**gaps), "    ")
    return CodeTask(family=family.name, text=text, solution=solution, function=function, calls=calls)


def _families(config: CodeTasksConfig) -> list[Family]:
    families = [family for level in config.levels for family in LEVELS[level]]
    if unknown := set(config.families) - {family.name for family in families}:
        known = ", ".join(family.name for family in families)
        raise DataError(f"code_tasks: no family {', '.join(sorted(unknown))} in levels {config.levels} (there are: {known})")
    return [family for family in families if not config.families or family.name in config.families]


def _split_of(key: str) -> str:
    share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") / 2**32
    return "held_out" if share < HELD_OUT_SHARE else "train"


def _draw_calls(
    rng: random.Random, family: Family, constants: Constants, *, num_tests: int
) -> tuple[Mapping[str, Any], ...] | None:
    """Calls that no neighbour of the solution passes, and no function that always returns the same; None if none were found."""
    function = _compiled(family)
    for _ in range(MAX_TEST_DRAWS):
        inputs = [family.inputs(rng, constants) for _ in range(num_tests)]
        results = [function(*_copied(args), **constants) for args in inputs]
        if all(result == results[0] for result in results):
            continue
        if any(_results(function, inputs, other) == results for other in _neighbours(family, constants)):
            continue
        return tuple({"args": list(args), "returns": result} for args, result in zip(inputs, results, strict=True))
    return None


def _neighbours(family: Family, constants: Constants) -> Iterator[Constants]:
    """The same constants with one of them off: numbers by one, texts for the next in the family's list."""
    for name, value in constants.items():
        if isinstance(value, int):
            yield {**constants, name: value + 1}
            yield {**constants, name: value - 1}
        else:
            choices = family.constants[name]
            yield {**constants, name: choices[(choices.index(value) + 1) % len(choices)]}


def _results(function: Callable[..., Any], inputs: list[tuple[Any, ...]], constants: Constants) -> list[Any] | None:
    try:
        return [function(*_copied(args), **constants) for args in inputs]
    except (ArithmeticError, ValueError, IndexError):
        return None


def _copied(args: tuple[Any, ...]) -> list[Any]:
    return [list(arg) if isinstance(arg, list) else arg for arg in args]


class _Bare(str):
    """A text that `!r` leaves as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@cache
def _compiled(family: Family) -> Callable[..., Any]:
    """The solution as a function of its parameters and, by name, its constants."""
    parameters = (*family.roles, *family.constants)
    body = family.body.format(**{name: _Bare(name) for name in parameters})
    source = f"def solution({', '.join(parameters)}):\n" + textwrap.indent(body, "    ")
    names: dict[str, Any] = {}
    exec(source, names)
    compiled: Callable[..., Any] = names["solution"]
    return compiled
