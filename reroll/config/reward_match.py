"""Rewards that compare an answer with a reference, or with a form it must have."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import Pattern
from reroll.config.reward_base import Extracting, InProcess


class MathReward(Extracting):
    r"""The final answer is the same mathematics as the reference: `\frac{1}{2}`, `1/2` and `0.5` are one answer."""

    in_process: ClassVar[bool] = True

    kind: Literal["math"]
    require_boxed: bool = False
    r"""Only what stands in `\boxed{}` counts; without, a text that boxes nothing is read for its last answer or number."""
    tolerance: float = Field(default=1e-6, ge=0)
    """How far, relative to the reference, a decimal may be off. Integers, fractions and roots must be equal exactly."""


class ChoiceReward(Extracting):
    """Multiple choice: the letter the text settles on, or the words of that option, against the reference letter."""

    kind: Literal["choice"]
    num_options: int = Field(default=10, ge=2, le=26)
    """How many letters, from A, are choices; where the row lists its options, their number counts instead."""
    options_key: str = "options"
    """The row's column with the options, as a list or as a mapping from letters; rows without it are judged by letter alone."""


class F1Reward(Extracting):
    """Word overlap with the best of the references, as SQuAD measures it: lower case, no articles, no punctuation."""

    kind: Literal["f1"]
    answers_key: str = "answers"
    """The row's column with more references; the reference answer itself may also be a JSON list."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """From this F1 on an answer is correct and below it wrong; null: the score runs from wrong to correct with F1."""


class SubstringReward(Extracting):
    """The reference, or one of several, stands in the text: case, articles and punctuation aside, and in whole words."""

    kind: Literal["substring"]
    answers_key: str = "answers"
    """The row's column with more references; the reference answer itself may also be a JSON list."""
    max_words: int | None = Field(default=None, ge=1)
    """Longer answers are wrong, so that naming everything does not pay; null: no limit."""


class RegexReward(InProcess):
    """The text matches a regular expression: a format reward."""

    kind: Literal["regex"]
    pattern: Pattern
    """What to look for; start it with (?s) to let a dot cross lines, with (?i) to ignore case."""
    whole: bool = False
    """The pattern must match the whole text, spaces around it aside, and not only a part of it."""
    correct: float = 1.0
    wrong: float = 0.0

    @property
    def verdict_on_hang(self) -> float | None:
        return self.wrong


class JsonSchemaReward(Extracting):
    """The answer, or its last fenced block, is JSON that fits a JSON Schema."""

    in_process: ClassVar[bool] = True

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] | None = None
    """The schema of every answer; null: each row brings its own."""
    schema_key: str = "schema"
    """The row's column with its schema, as a mapping or as JSON text; read where json_schema is null."""
    strict: bool = False
    """The answer must be the JSON and nothing else: no fence, no words around it."""
