"""Instruction following: the options of generated tasks, and of how answers to them are judged."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from reroll.config.data_base import RowSourceConfig
from reroll.config.reward_base import RewardConfig

InstructionId = Literal[
    "keywords:existence",
    "keywords:frequency",
    "keywords:forbidden_words",
    "keywords:letter_frequency",
    "language:response_language",
    "length_constraints:number_sentences",
    "length_constraints:number_paragraphs",
    "length_constraints:number_words",
    "length_constraints:nth_paragraph_first_word",
    "detectable_content:number_placeholders",
    "detectable_content:postscript",
    "detectable_format:number_bullet_lists",
    "detectable_format:constrained_response",
    "detectable_format:number_highlighted_sections",
    "detectable_format:multiple_sections",
    "detectable_format:json_format",
    "detectable_format:title",
    "combination:two_responses",
    "combination:repeat_prompt",
    "startend:end_checker",
    "startend:quotation",
    "change_case:capital_word_frequency",
    "change_case:english_capital",
    "change_case:english_lowercase",
    "punctuation:no_comma",
]
"""The instructions of IFEval, by its ids."""
INSTRUCTION_IDS: tuple[InstructionId, ...] = get_args(InstructionId)


class InstructionTasksConfig(RowSourceConfig):
    """Generated writing tasks with verifiable instructions, judged by reward kind `instructions`.

    Every task carries an answer that follows all of its instructions.
    """

    runs: ClassVar[str] = "reroll_zoo.ifeval.tasks:instruction_rows"

    kind: Literal["instructions"] = "instructions"
    size: int = Field(default=1000, ge=1)
    """How many tasks to generate."""
    seed: int = 0
    """Different seeds give different tasks."""
    split: Literal["train", "held_out"] = "train"
    """Which topics the tasks are about. The two splits share none, so no held-out task is ever in a training source."""
    families: tuple[InstructionId, ...] = Field(default=INSTRUCTION_IDS, min_length=1)
    """The instructions that tasks may carry."""
    num_instructions: tuple[Annotated[int, Field(ge=1, le=3)], ...] = Field(default=(1, 2, 3), min_length=1)
    """How many a task may carry; drawn evenly. Those that contradict each other never meet."""
    difficulty: Literal["easy", "medium", "hard"] = "easy"
    """How large the numbers are: easy asks for 2 or 3 bullets and a few sentences, within reach of a 135M-parameter model."""


class InstructionsConfig(RewardConfig):
    """Whether an answer keeps to verifiable instructions, as IFEval states them (columns instruction_id_list and kwargs)."""

    runs: ClassVar[str] = "reroll_zoo.ifeval.verifier:Instructions"

    kind: Literal["instructions"] = "instructions"
    mode: Literal["strict", "loose"] = "strict"
    """loose: an instruction also counts as followed if it is without the first line, the last line or asterisks."""
    credit: Literal["all", "fraction"] = "all"
    """all: 1 if every instruction is followed, else 0. fraction: the share of them that is."""
