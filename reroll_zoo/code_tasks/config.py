"""Generated programming tasks as a source of prompts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.data_base import RowSourceConfig


class CodeTasksConfig(RowSourceConfig):
    """Small programming tasks with tests and a solution, drawn by seed: for reward kind `code`, and small models."""

    runs: ClassVar[str] = "reroll_zoo.code_tasks.draw:code_rows"

    kind: Literal["code_tasks"] = "code_tasks"
    size: int = Field(default=1000, ge=1)
    """How many tasks to generate. No two are alike."""
    seed: int = 0
    """Different seeds give different tasks."""
    split: Literal["train", "held_out"] = "train"
    """The two never share a task, whatever their seeds: a held-out task has constants or words that no training task has."""
    levels: list[Literal[1, 2, 3]] = Field(default=[1, 2, 3], min_length=1)
    """1: one expression. 2: one loop, or one trick. 3: two steps, dynamic programming, parsing."""
    families: list[str] = Field(default_factory=list)
    """Only tasks of these families, e.g. `[sum_of_list, digit_sum]`; none: every family of the levels."""
    num_tests: int = Field(default=6, ge=2, le=50)
    """How many calls test a task."""
