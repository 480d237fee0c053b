from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reroll.errors import RewardError
from reroll.rewards.base import extract
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.text.match import Exact, ExactRewardConfig, Numeric, NumericRewardConfig, last_number


def prompt(answer: str | None) -> Prompt:
    return Prompt(id="math/1", messages=({"role": "user", "content": "?"},), domain="math", answer=answer)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("the answer is 42.", 42),
        ("first 7, then 42", 42),
        ("-3.5", Fraction(-7, 2)),
        ("−3", -3),
        ("+8", 8),
        ("1,234,567.5", Fraction("1234567.5")),
        ("-$1,200", -1200),
        ("$0.75", Fraction(3, 4)),
        ("it grew by 50%", 50),
        ("6.02e23", Fraction(602 * 10**21)),
        ("1E-3", Fraction(1, 1000)),
        ("3/4", Fraction(3, 4)),
        ("-1/2", Fraction(-1, 2)),
        (".5", Fraction(1, 2)),
        ("10-5", 5),
        ("[1,2,3]", 3),
        ("5kg", 5),
        ("x=12", 12),
        (r"\boxed{12}", 12),
        ("nothing here", None),
        ("", None),
        ("nan", None),
        ("inf or -Infinity", None),
        ("1/0", None),
        ("H2O", None),
        ("9" * 5000, None),
        ("0." + "0" * 5000 + "1", None),
    ],
)
def test_the_last_number_of_a_text_is_read_as_people_write_numbers(text: str, number: int | Fraction | None) -> None:
    assert last_number(text) == number


@given(st.text())
def test_reading_a_number_never_fails_on_any_text(text: str) -> None:
    assert last_number(text) is None or isinstance(last_number(text), Fraction)


@given(st.text(alphabet="0123456789.,eE+-/$%− ", max_size=80))
def test_reading_a_number_never_fails_on_text_made_of_its_parts(text: str) -> None:
    assert last_number(text) is None or isinstance(last_number(text), Fraction)


@given(st.integers(), st.text(alphabet="abc .,:\n", max_size=20))
def test_an_integer_is_read_back_whatever_is_said_before_it(value: int, before: str) -> None:
    assert last_number(f"{before} {value}") == value
    assert last_number(f"{before} {value:,}") == value


def test_numeric_pays_for_the_same_number_written_otherwise() -> None:
    reward = Numeric(NumericRewardConfig(kind="numeric", correct=2.0, wrong=-1.0))
    assert reward(prompt("0.75"), said("so we get 3/4")).value == 2.0
    assert reward(prompt("#### 1,000"), said("1000.0")).value == 2.0
    assert reward(prompt("1000"), said("999")).value == -1.0
    assert reward(prompt("1000"), said("I do not know")).value == -1.0


def test_numeric_tells_long_numbers_apart_that_a_float_cannot() -> None:
    reward = Numeric(NumericRewardConfig(kind="numeric"))
    assert reward(prompt("123456789012345678901"), said("123456789012345678901")).value == 1.0
    assert reward(prompt("123456789012345678901"), said("123456789012345678900")).value == 0.0


def test_numeric_tolerance_is_absolute_and_inclusive() -> None:
    reward = Numeric(NumericRewardConfig(kind="numeric", tolerance=0.5))
    assert reward(prompt("10"), said("10.5")).value == 1.0
    assert reward(prompt("10"), said("10.51")).value == 0.0


def test_numeric_relative_tolerance_grows_with_the_reference_and_the_wider_one_counts() -> None:
    reward = Numeric(NumericRewardConfig(kind="numeric", tolerance=0.5, relative_tolerance=0.01))
    assert reward(prompt("-1000"), said("-990")).value == 1.0
    assert reward(prompt("-1000"), said("-989.9")).value == 0.0
    assert reward(prompt("10"), said("10.5")).value == 1.0
    assert reward(prompt("0"), said("0.6")).value == 0.0


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_nan_and_infinity_never_match(text: str) -> None:
    reward = Numeric(NumericRewardConfig(kind="numeric", tolerance=1e300))
    assert reward(prompt("0"), said(text)).value == 0.0


def test_numeric_refuses_a_reference_without_a_number() -> None:
    with pytest.raises(RewardError, match="math/1 holds no number: 'blue'"):
        Numeric(NumericRewardConfig(kind="numeric"))(prompt("blue"), said("3"))


def test_exact_ignores_surrounding_spaces_and_case_only_when_asked() -> None:
    strict = Exact(ExactRewardConfig(kind="exact"))
    assert strict(prompt(" Paris "), said("Paris\n")).value == 1.0
    assert strict(prompt("Paris"), said("paris")).value == 0.0
    assert Exact(ExactRewardConfig(kind="exact", ignore_case=True))(prompt("STRASSE"), said("straße")).value == 1.0


def test_a_missing_reference_answer_fails_the_sample_with_the_fix() -> None:
    for reward in (Exact(ExactRewardConfig(kind="exact")), Numeric(NumericRewardConfig(kind="numeric"))):
        with pytest.raises(RewardError, match="math/1 has no reference answer: set answer_key"):
            reward(prompt(None), said("3"))


def test_the_last_match_of_the_pattern_is_the_answer() -> None:
    pattern = r"<answer>(.*?)</answer>"
    text = "<answer>1</answer> no: <answer>2</answer> is right, not 3"
    assert extract(text, pattern) == "2"
    assert extract("no tags", pattern) is None
    assert extract("a1 b2", r"[a-z]\d") == "b2"
    assert extract("anything", None) == "anything"
    assert Numeric(NumericRewardConfig(kind="numeric", pattern=pattern))(prompt("2"), said(text)).value == 1.0
    assert Numeric(NumericRewardConfig(kind="numeric", pattern=pattern))(prompt("3"), said("it is 3")).value == 0.0
    assert Exact(ExactRewardConfig(kind="exact", pattern=pattern))(prompt("2"), said(text)).value == 1.0
    assert Exact(ExactRewardConfig(kind="exact", pattern=pattern))(prompt("2"), said("2")).value == 0.0


def test_a_pattern_that_is_no_regular_expression_is_refused_with_the_config() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        NumericRewardConfig(kind="numeric", pattern="(")
