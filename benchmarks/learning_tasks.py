"""The tasks on which trainers are compared by what they learn: a question, and the number that answers it. No reroll imports:
the peers' processes read it too."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

GROUP_SIZE = 8
PROMPTS_PER_STEP = 16
MAX_TOKENS = 32
NUM_HELD_OUT = 64

Row = dict[str, str]


def _sum(draw: random.Random) -> Row:
    first, second = draw.randint(1, 99), draw.randint(1, 99)
    return {"prompt": f"What is {first} plus {second}?", "answer": str(first + second)}


def _product(draw: random.Random) -> Row:
    first, second = draw.randint(2, 12), draw.randint(2, 30)
    return {"prompt": f"What is {first} times {second}?", "answer": str(first * second)}


def _order(draw: random.Random) -> Row:
    digits = "".join(draw.choices("123456789", k=3))
    return {"prompt": f"Sort the digits of {digits}.", "answer": "".join(sorted(digits))}


TASKS: dict[str, Callable[[random.Random], Row]] = {"sums": _sum, "products": _product, "sorting": _order}


def held_out(task: str) -> list[Row]:
    """The same under every seed."""
    draw, found = random.Random(task), dict[str, Row]()
    while len(found) < NUM_HELD_OUT:
        row = TASKS[task](draw)
        found[row["prompt"]] = row
    return list(found.values())


def to_train(task: str, *, seed: int, num: int) -> list[Row]:
    """In the order in which every trainer takes them; none is held out."""
    draw, kept = random.Random(f"{task} {seed}"), {row["prompt"] for row in held_out(task)}
    rows: list[Row] = []
    while len(rows) < num:
        if (row := TASKS[task](draw))["prompt"] not in kept:
            rows.append(row)
    return rows


def reward_of(text: str, answer: str) -> float:
    """One if the last number in the text is the answer."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)
