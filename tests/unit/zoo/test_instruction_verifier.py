from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from reroll.errors import RewardError
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.ifeval.config import InstructionsConfig
from reroll_zoo.ifeval.instructions import INSTRUCTIONS
from reroll_zoo.ifeval.verifier import Instructions, variants


def prompt(**extra: Any) -> Prompt:
    return Prompt(id="follow/1", messages=({"role": "user", "content": "?"},), domain="follow", extra=extra)


def row(*instructions: tuple[str, dict[str, Any]]) -> Prompt:
    return prompt(instruction_id_list=[name for name, _ in instructions], kwargs=[kwargs for _, kwargs in instructions])


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


def judge(task: Prompt, text: str, **options: Any) -> Score:
    return Instructions(InstructionsConfig(kind="instructions", **options))(task, said(text))


NO_COMMA: tuple[str, dict[str, Any]] = ("punctuation:no_comma", {})
TWO_WORDS: tuple[str, dict[str, Any]] = ("length_constraints:number_words", {"num_words": 2, "relation": "at least"})
TITLE: tuple[str, dict[str, Any]] = ("detectable_format:title", {})
QUOTATION: tuple[str, dict[str, Any]] = ("startend:quotation", {})


def test_an_answer_that_follows_everything_scores_one() -> None:
    score = judge(row(NO_COMMA, TWO_WORDS), "two words")
    assert score == Score(value=1.0, info={"followed": 1.0, "punctuation": 1.0, "length_constraints": 1.0})


def test_one_broken_instruction_costs_everything_or_its_share() -> None:
    task = row(NO_COMMA, TWO_WORDS, TITLE, QUOTATION)
    assert judge(task, "well, two").value == 0.0
    score = judge(task, "well, two", credit="fraction")
    assert score.value == 0.25
    assert score.info == {
        "followed": 0.25,
        "punctuation": 0.0,
        "length_constraints": 1.0,
        "detectable_format": 0.0,
        "startend": 0.0,
    }


def test_instructions_of_one_group_share_a_part() -> None:
    has = ("keywords:existence", {"keywords": ["sea"]})
    lacks = ("keywords:forbidden_words", {"forbidden_words": ["sea"]})
    assert judge(row(has, lacks), "the sea").info == {"followed": 0.5, "keywords": 0.5}


@pytest.mark.parametrize("text", ["", " ", "\n\n"])
@pytest.mark.parametrize("options", [{}, {"mode": "loose"}, {"credit": "fraction"}])
def test_an_empty_answer_scores_zero_even_where_nothing_is_all_that_was_asked(text: str, options: dict[str, Any]) -> None:
    fewer = ("length_constraints:number_words", {"num_words": 9, "relation": "less than"})
    assert judge(row(NO_COMMA, fewer), text, **options).value == 0.0


def test_an_episode_without_a_turn_scores_zero() -> None:
    nothing = Trajectory(id="s", turns=(), status=Status.COMPLETED)
    assert Instructions(InstructionsConfig(kind="instructions"))(row(NO_COMMA), nothing).value == 0.0


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (QUOTATION, 'Sure, here it is:\n"The sea is blue."'),
        (QUOTATION, '"The sea is blue."\nAnything else?'),
        (QUOTATION, 'Sure:\n"The sea is blue."\nAnything else?'),
        (QUOTATION, '**"The sea is blue."**'),
        (QUOTATION, 'Sure:\n**"The sea is blue."**'),
        (QUOTATION, '*"The sea is blue."*\nAnything else?'),
        (QUOTATION, 'Sure:\n*"The sea is blue."*\nAnything else?'),
    ],
)
def test_loose_looks_past_an_opening_a_closing_and_asterisks(instruction: tuple[str, dict[str, Any]], text: str) -> None:
    assert judge(row(instruction), text).value == 0.0
    assert judge(row(instruction), text, mode="loose").value == 1.0


def test_there_are_eight_variants() -> None:
    assert variants("a*\nb*\nc*") == ["a*\nb*\nc*", "a\nb\nc", "b*\nc*", "b\nc", "a*\nb*", "a\nb", "b*", "b"]


def test_loose_still_fails_what_no_variant_follows() -> None:
    assert judge(row(TITLE), "Sure:\nThe sea is blue.\nBye.", mode="loose").value == 0.0


def test_a_variant_that_is_empty_follows_nothing() -> None:
    assert judge(row(NO_COMMA), "well, one line", mode="loose").value == 0.0


def test_nulls_and_whole_floats_of_columnar_files_do_no_harm() -> None:
    nulls = {"keywords": None, "num_bullets": None}
    task = prompt(
        instruction_id_list=["length_constraints:number_words", "punctuation:no_comma"],
        kwargs=[{**nulls, "num_words": 2.0, "relation": "at least"}, None],
    )
    assert judge(task, "two words").value == 1.0


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": "punctuation:no_comma", "kwargs": "{}"},
    ],
)
def test_a_row_without_instructions_is_an_error_that_names_the_columns(extra: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"follow/1 holds no instructions.*instruction_id_list"):
        judge(prompt(**extra), "text")


def test_an_unknown_instruction_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(RewardError, match="'style:funny'") as error:
        judge(row(NO_COMMA, ("style:funny", {})), "text")
    assert all(name in str(error.value) for name in INSTRUCTIONS)


@pytest.mark.parametrize(
    ("name", "kwargs", "problem"),
    [
        ("length_constraints:number_words", {"relation": "at least"}, "num_words"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "roughly"}, "relation"),
        ("length_constraints:number_words", {"num_words": "many", "relation": "at least"}, "num_words"),
        ("punctuation:no_comma", {"num_words": 3}, "num_words"),
        ("keywords:existence", {"keywords": []}, "keywords"),
        ("language:response_language", {"language": "tlh"}, "unknown language 'tlh'"),
    ],
)
def test_bad_arguments_are_an_error_that_names_them(name: str, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=f"bad arguments for {name}.*{problem}"):
        judge(row((name, kwargs)), "text")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="mode"):
        InstructionsConfig.model_validate({"kind": "instructions", "mode": "lax"})
