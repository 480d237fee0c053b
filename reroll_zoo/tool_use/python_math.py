"""Questions about whole numbers that are too long for the head, and a Python interpreter to work them out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from reroll.tokens.tool_calls import Call
from reroll.types import Message
from reroll_zoo.sandbox.config import LocalSandboxConfig, SandboxConfig
from reroll_zoo.tool_use.answers import same_number
from reroll_zoo.tool_use.config import ToolLimitsConfig
from reroll_zoo.tool_use.env import Task, ToolLoop
from reroll_zoo.tool_use.python import python_tool

_RULES = "Solve the problem. Calculate with the tool python."


@dataclass(frozen=True, slots=True)
class QuestionTemplate:
    """A question with gaps for numbers, and the Python expression of its answer with the same gaps."""

    question: str
    expression: str
    ranges: Mapping[str, tuple[int, int]]
    """By gap: the smallest and the largest number drawn for it."""


KINDS = (
    QuestionTemplate(
        "What is {a} * {b} modulo {m}?", "{a} * {b} % {m}", {"a": (10**5, 10**7), "b": (10**5, 10**7), "m": (101, 9999)}
    ),
    QuestionTemplate("What is {a}^{b} modulo {m}?", "pow({a}, {b}, {m})", {"a": (100, 9999), "b": (50, 999), "m": (101, 9999)}),
    QuestionTemplate(
        "What is the sum of the digits of {a}^{b}?", "sum(map(int, str({a}**{b})))", {"a": (100, 9999), "b": (10, 99)}
    ),
    QuestionTemplate(
        "What is the least common multiple of {a} and {b}?", "math.lcm({a}, {b})", {"a": (1000, 99999), "b": (1000, 99999)}
    ),
    QuestionTemplate(
        "How many prime numbers are there from {a} to {a} + {n}?",
        "sum(all(k % d for d in range(2, math.isqrt(k) + 1)) for k in range({a}, {a} + {n} + 1))",
        {"a": (1000, 99999), "n": (100, 999)},
    ),
    QuestionTemplate(
        "How many whole numbers from 1 to {n} are divisible by {a} or by {b}?",
        "sum(k % {a} == 0 or k % {b} == 0 for k in range(1, {n} + 1))",
        {"n": (1000, 20000), "a": (6, 40), "b": (6, 40)},
    ),
    QuestionTemplate(
        "What is the sum of the squares of the whole numbers from {a} to {a} + {n}?",
        "sum(k**2 for k in range({a}, {a} + {n} + 1))",
        {"a": (100, 9999), "n": (10, 999)},
    ),
    QuestionTemplate(
        "What is the largest prime factor of {n}?",
        "max(k for k in range(2, {n} + 1) if {n} % k == 0 and all(k % d for d in range(2, math.isqrt(k) + 1)))",
        {"n": (10**4, 3 * 10**5)},
    ),
)


class PythonMathConfig(ToolLimitsConfig):
    """Questions about whole numbers that are too long for the head and one line of Python. A right answer pays 1."""

    runs: ClassVar[str] = "reroll_zoo.tool_use.python_math:PythonMath"

    kind: Literal["python_math"] = "python_math"
    max_calls: int = Field(default=4, ge=1)
    """Tool calls in an episode. A turn that still calls when none is left truncates it."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of the process that runs the code."""
    sandbox: SandboxConfig = LocalSandboxConfig()
    """Where the code runs."""

    def prepare(self) -> None:
        self.make().close()  # It opens the sandbox, or says what the machine lacks.


class PythonMath(ToolLoop):
    """One problem."""

    def __init__(self, options: PythonMathConfig) -> None:
        super().__init__(options, tools=[python_tool(memory_mb=options.memory_mb, sandbox=options.sandbox)])
        self._code = ""

    def draw_task(self, seed: int) -> Task:
        question, expression = draw_problem(seed)
        self._code = f"import math\nprint({expression})" if "math." in expression else f"print({expression})"
        messages = (Message(role="system", content=_RULES), Message(role="user", content=question))
        return Task(messages=messages, answer=str(calculate(expression)))

    def is_right(self, answer: str, expected: str) -> bool:
        return same_number(answer, expected)

    def solve(self) -> list[str]:
        """Run the code, then say what it prints. Empty when the episode is over."""
        return self.play_on([Call("python", {"code": self._code})])


def draw_problem(seed: int) -> tuple[str, str]:
    """The question of this seed, and the expression of its answer."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    numbers = {gap: rng.randint(low, high) for gap, (low, high) in kind.ranges.items()}
    return kind.question.format(**numbers), kind.expression.format(**numbers)


def calculate(expression: str) -> int:
    """The value of one of the expressions above."""
    # Ours alone are evaluated here; what a policy writes runs in the sandbox.
    return int(eval(expression, {"math": math}))
