from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reroll.errors import RewardError
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.text.overlap import F1, F1Config, Substring, SubstringConfig

TAGGED = "<answer>(.*?)</answer>"


def asked(answer: str | None, **extra: object) -> Prompt:
    return Prompt(id="qa/3", messages=(), domain="qa", answer=answer, extra=extra)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris", "paris.", 1.0),
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("The", "the", 1.0),
        ("Eiffel Tower", "a tower", 2 / 3),
        ("Eiffel Tower", "The Eiffel Tower in Paris", 2 / 3),
        ("one two three four", "one two", 2 / 3),
        ("well-known", "well known", 1.0),
        ("it's", "its", 1.0),
        ("a a b", "b", 1.0),
        ("x x y", "x y y", 2 / 3),
        ("x", "x x x", 0.5),
        ("café", "CAFÉ", 1.0),
        ("STRASSE", "straße", 1.0),
        ("½", "1⁄2", 1.0),
        ("Paris", "London", 0.0),
        ("Paris", "", 0.0),
        ("Paris", "...", 0.0),
        ("Paris", "the", 0.0),
        ("Paris", "Parisian", 0.0),
        ('["Paris", "City of Light"]', "the city of light", 1.0),
        ('["Paris", "City of Light"]', "Paris", 1.0),
        ('["Paris"', "paris", 1.0),
    ],
)
def test_f1_counts_the_words_both_sides_have(answer: str, text: str, score: float) -> None:
    assert F1(F1Config(kind="f1"))(asked(answer), said(text)).value == pytest.approx(score)


def test_f1_takes_the_best_of_the_references_in_the_row() -> None:
    reward = F1(F1Config(kind="f1"))
    assert reward(asked(None, answers=["nine", "9"]), said("9")) == Score(value=1.0, info={"f1": 1.0, "exact": 1.0}, answer="9")
    assert reward(asked("nine", answers=["9", ""]), said("the nine")).value == 1.0
    assert reward(asked("nine", answers="9"), said("9")).value == 1.0
    assert F1(F1Config(kind="f1", answers_key="gold"))(asked(None, gold=["x"]), said("x")).value == 1.0


def test_f1_runs_from_wrong_to_correct_and_a_threshold_makes_it_all_or_nothing() -> None:
    scaled = F1(F1Config(kind="f1", correct=2.0, wrong=-1.0))
    assert scaled(asked("Eiffel Tower"), said("tower")).value == pytest.approx(1.0)
    strict = F1(F1Config(kind="f1", threshold=0.6))
    assert strict(asked("Eiffel Tower"), said("tower")).value == 1.0
    assert strict(asked("Eiffel Tower"), said("a tall tower")).value == 0.0
    assert strict(asked("Eiffel Tower"), said("a tall tower")).info == {"f1": 0.5, "exact": 0.0}
    with pytest.raises(ValidationError):
        F1Config(kind="f1", threshold=0.0)


@pytest.mark.parametrize(
    ("answer", "text", "is_correct"),
    [
        ("Paris", "It is Paris.", True),
        ("Paris", "PARIS", True),
        ("New York", "I flew to new york city", True),
        ("New York", "new (York)", True),
        ("the Beatles", "Beatles", True),
        ("Beatles", "It was the Beatles!", True),
        ("St. Louis", "st louis", True),
        ("42", "the result is 42.", True),
        ("U.S.", "the US", True),
        ('["Rome", "Roma"]', "Roma, of course", True),
        ("café", "a CAFÉ there", True),
        ("Paris", "Parisian", False),
        ("cat", "concatenate", False),
        ("New York", "York is new", False),
        ("New York", "new in York", False),
        ("42", "142 or 421", False),
        ("Paris", "", False),
        ("Paris", "London", False),
        ("long answer here", "long answer", False),
        ('["Rome", "Roma"]', "Milan", False),
    ],
)
def test_a_substring_is_found_in_whole_words(answer: str, text: str, is_correct: bool) -> None:
    assert Substring(SubstringConfig(kind="substring"))(asked(answer), said(text)).value == float(is_correct)


def test_naming_everything_does_not_pay_where_words_are_limited() -> None:
    reward = Substring(SubstringConfig(kind="substring", max_words=3, correct=2.0, wrong=-1.0))
    assert reward(asked("Paris"), said("It is Paris")).value == 2.0
    assert reward(asked("Paris"), said("London Paris Rome Berlin")).value == -1.0


def test_a_pattern_chooses_the_part_that_is_compared() -> None:
    text = "Paris? <answer>London</answer>"
    assert Substring(SubstringConfig(kind="substring", pattern=TAGGED))(asked("Paris"), said(text)).value == 0.0
    assert F1(F1Config(kind="f1", pattern=TAGGED))(asked("London"), said(text)).value == 1.0
    assert F1(F1Config(kind="f1", pattern=TAGGED))(asked("London"), said("London")).value == 0.0


@pytest.mark.parametrize("prompt", [asked(None), asked(""), asked("..."), asked("[]"), asked(None, answers=[])])
def test_a_row_without_a_reference_is_named_with_the_fix(prompt: Prompt) -> None:
    for reward in (F1(F1Config(kind="f1")), Substring(SubstringConfig(kind="substring"))):
        with pytest.raises(RewardError, match="qa/3 has no reference answer: set answer_key"):
            reward(prompt, said("x"))


@given(st.text())
def test_a_reference_earns_all_and_any_text_earns_something_between(text: str) -> None:
    f1, substring = F1(F1Config(kind="f1")), Substring(SubstringConfig(kind="substring"))
    assert 0.0 <= f1(asked("zwölf boxkämpfer"), said(text)).value <= 1.0
    assert substring(asked("zwölf boxkämpfer"), said(text)).value == 0.0
    assert f1(asked("zwölf boxkämpfer"), said("zwölf boxkämpfer")).value == 1.0
