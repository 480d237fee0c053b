"""What a family of generated programming tasks is, and the arguments that its tests are drawn from.

A wording and a solution have gaps: one for each parameter, by its role (`{n}`, `{xs}`, `{s}`), and one for each constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Constants = Mapping[str, Any]
Inputs = Callable[[random.Random, Constants], tuple[Any, ...]]

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "a": ("a", "x", "p", "first"),
    "b": ("b", "y", "q", "second"),
    "n": ("n", "number", "x", "value", "num"),
    "xs": ("numbers", "values", "xs", "nums", "data", "items"),
    "s": ("text", "s", "string", "line"),
    "w": ("word", "name", "s", "text"),
    "ws": ("words", "names", "strings", "parts"),
}
"""What a parameter of each role may be called. Roles that occur together share no place in their lists."""
FUNCTIONS = ("f", "solve", "compute", "answer", "task", "func", "run", "apply")
"""What a function may be called, besides its family's own name."""

# fmt: off
WORDS = (
    "apple", "river", "stone", "cloud", "green", "tiger", "lemon", "chair", "piano", "ocean", "bread", "candle", "garden",
    "mirror", "silver", "winter", "basket", "yellow", "rabbit", "planet", "coffee", "button", "forest", "needle", "pepper",
    "tea", "sun", "ice", "map", "owl", "fox", "box", "key", "jar",
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Tasks that differ by their constants, their names and their wording."""

    name: str
    says: tuple[str, ...]
    """Ways to end the sentence `Write a Python function that …`."""
    roles: tuple[str, ...]
    """The parameters, by role."""
    body: str
    """The solution's lines, not indented."""
    inputs: Inputs
    """Draws the arguments of one test."""
    constants: Mapping[str, range | tuple[str, ...]] = field(default_factory=dict)


def number(low: int = -20, high: int = 50) -> Inputs:
    """One number."""
    return lambda rng, _: (rng.randint(low, high),)


def numbers(low: int = -9, high: int = 20, *, shortest: int = 1, longest: int = 7) -> Inputs:
    """One list of numbers."""
    return lambda rng, _: ([rng.randint(low, high) for _ in range(rng.randint(shortest, longest))],)


def word(rng: random.Random, _: Constants) -> tuple[str]:
    """One word."""
    return (rng.choice(WORDS),)


def sentence(rng: random.Random, _: Constants) -> tuple[str]:
    """One to five words in one text."""
    return (" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5))),)


def repetitive(rng: random.Random, _: Constants) -> tuple[str]:
    """A text of runs of the same letter."""
    return ("".join(rng.choice("abc") * rng.randint(1, 4) for _ in range(rng.randint(1, 5))),)


def around(constant: str) -> Inputs:
    """Numbers on both sides of a constant, and the constant itself."""
    return lambda rng, constants: ([constants[constant] + rng.randint(-4, 4) for _ in range(rng.randint(3, 8))],)


def multiples(constant: str) -> Inputs:
    """Numbers of which many are multiples of a constant."""

    def draw(rng: random.Random, constants: Constants) -> tuple[list[int]]:
        step = constants[constant]
        return ([rng.choice((step * rng.randint(0, 6), rng.randint(1, 40))) for _ in range(rng.randint(3, 7))],)

    return draw
