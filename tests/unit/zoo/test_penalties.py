"""How something is said, judged alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.text.penalties import (
    Language,
    LanguageConfig,
    Length,
    LengthConfig,
    Overlong,
    OverlongConfig,
    Repetition,
    RepetitionConfig,
)

PROMPT = Prompt(id="p/0", messages=(), domain="p")


def said(*texts: str, tokens: int = 1) -> Trajectory:
    completion = Completion(
        token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, finish_reason=FinishReason.STOP, versions=((0, tokens),)
    )
    turns = tuple(Turn(prompt_ids=(0,), completion=completion, text=text) for text in texts)
    return Trajectory(id="s", turns=turns, status=Status.COMPLETED)


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (60, 0), (80, -0.5), (90, -0.75), (100, -1), (101, -1), (900, -1)])
def test_overlong_grows_over_the_buffer_as_in_dapo(tokens: int, value: float) -> None:
    reward = Overlong(OverlongConfig(kind="overlong", max_tokens=100, buffer_tokens=40))
    assert reward(PROMPT, said("", tokens=tokens)).value == value


def test_lengths_count_all_turns() -> None:
    reward = Overlong(OverlongConfig(kind="overlong", max_tokens=100, buffer_tokens=40))
    assert reward(PROMPT, said("a", "b", tokens=40)).value == -0.5
    assert Length(LengthConfig(kind="length", max_tokens=100))(PROMPT, said("a", "b", tokens=40)).value == pytest.approx(0.2)


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (10, 0.5), (20, 1), (60, 0.5), (100, 0), (300, 0)])
def test_a_target_length_earns_most(tokens: int, value: float) -> None:
    reward = Length(LengthConfig(kind="length", max_tokens=100, target_tokens=20))
    assert reward(PROMPT, said("", tokens=tokens)).value == value


@pytest.mark.parametrize(("tokens", "value"), [(0, 1), (25, 0.75), (100, 0), (101, 0)])
def test_without_a_target_shorter_is_better(tokens: int, value: float) -> None:
    assert Length(LengthConfig(kind="length", max_tokens=100))(PROMPT, said("", tokens=tokens)).value == value


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["one two three four five"], 0.0),
        (["a b a b a b"], -3 / 5),  # ab ba ab ba ab: two are new
        (["A b, a B"], -1 / 4),  # ab b, ,a ab
        (["so so so so so"], -3 / 4),
        (["了了了了了"], -3 / 4),
        (["!!!!!"], -3 / 4),
        (["ha" * 60], -8 / 9),  # one word of 120 letters counts as ten
        (["left now", "left now"], 0.0),  # every turn may say what an earlier one said
        (["so so so", "new words here"], -1 / 4),
        (["one"], 0.0),
        ([""], 0.0),
    ],
)
def test_repetition_costs_the_share_of_what_was_said_before(texts: list[str], value: float) -> None:
    reward = Repetition(RepetitionConfig(kind="repetition", ngram=2))
    assert reward(PROMPT, said(*texts)).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("scripts", "text", "value"),
    [
        (["latin"], "plain words, 1 + 2 = 3 ✓", 0.0),
        (["latin"], "naïve Ærøskøbing", 0.0),
        (["latin"], "ab了c", -1 / 4),
        (["latin"], "да", -1.0),
        (["latin"], "ｆｕｌｌ 𝐛𝐨𝐥𝐝", 0.0),
        (["latin"], "αβ ab", -1 / 2),
        (["latin", "greek"], "αβ ab", 0.0),
        (["cyrillic"], "Да, да!", 0.0),
        (["han", "kana"], "日本語のテスト、カタカナー人々", 0.0),
        (["han"], "日本の", -1 / 3),
        (["hangul"], "안녕하세요", 0.0),
        (["arabic"], "مرحبا", 0.0),
        (["hebrew"], "שלום", 0.0),
        (["devanagari"], "नमस्ते", 0.0),
        (["bengali"], "বাংলা", 0.0),
        (["tamil"], "தமிழ்", 0.0),
        (["thai"], "สวัสดี", 0.0),
        (["latin"], "12 + 3 = 15", 0.0),
        (["latin"], "", 0.0),
    ],
)
def test_language_costs_the_share_of_foreign_letters(scripts: list[str], text: str, value: float) -> None:
    reward = Language(LanguageConfig.model_validate({"kind": "language", "scripts": scripts}))
    assert reward(PROMPT, said(text)).value == pytest.approx(value)


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_penalties_stay_between_minus_one_and_zero_on_any_text(texts: list[str]) -> None:
    trajectory = said(*texts)
    for reward in (
        Repetition(RepetitionConfig(kind="repetition")),
        Language(LanguageConfig(kind="language")),
    ):
        assert -1.0 <= reward(PROMPT, trajectory).value <= 0.0
