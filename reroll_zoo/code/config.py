"""Programs as answers, judged by tests."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll_zoo.sandbox.config import SandboxedRewardConfig


class CodeLimitsConfig(Node):
    """What one run of a program may use."""

    wall_s: float = Field(default=10.0, gt=0)
    """By the clock, from the program's own start."""
    cpu_s: float = Field(default=5.0, gt=0)
    """CPU time, with all processes that it starts."""
    memory_mb: int = Field(default=512, ge=16)
    """With all processes that it starts."""
    processes: int = Field(default=16, ge=1)
    """Processes and threads alive at a time."""
    file_mb: int = Field(default=16, ge=1)
    """All that it may have written to disk at a time."""
    output_kb: int = Field(default=1024, ge=1)
    """Of standard output and of standard error, each. What a function returns counts too."""


class CodeConfig(SandboxedRewardConfig):
    """The answer is a program. It runs in a sandbox against the tests of the row."""

    runs: ClassVar[str] = "reroll_zoo.code.reward:Code"

    kind: Literal["code"] = "code"
    tests_key: str = "tests"
    """The row's column with the tests: `{stdin, stdout}` for programs, `{function, calls}` for functions, a list of assert
    statements, or `{inputs, outputs, fn_name}` as APPS and TACO have it."""
    language: Literal["python", "cpp", "auto"] = "python"
    """`auto` goes by the tag of the fence. Functions and asserts are tests for Python alone."""
    after: str = ""
    """Only what follows the last time this text is said counts, e.g. `</think>`; an answer without it is wrong."""
    require_fence: bool = False
    """Whether a program must stand between ``` fences; else, without a fence, the whole text is the program."""
    credit: Literal["all", "fraction"] = "all"
    """`all`: right when every test passes; judging ends with the first that fails. `fraction`: the share of tests that pass."""
    correct: float = 1.0
    """What a program earns that passes all tests."""
    wrong: float = 0.0
    """What one earns that passes none."""
    tolerance: float = Field(default=1e-6, ge=0)
    """How far, absolutely or relatively, a number may be off where the expected one is not whole. A whole number for it, such
    as 0 for 0.0000001, must be that near relatively. Spaces between printed words and before lines never count."""
    loose: bool = True
    """Compare values as JSON would: a tuple equals a list, a key that is a number equals its text."""
    call_s: float = Field(default=4.0, gt=0)
    """Time for one call of a function; a program's run, and all calls of a row together, have `limits.wall_s`."""
    limits: CodeLimitsConfig = CodeLimitsConfig()
