from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import RewardError
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.text.choice import Choice, ChoiceConfig, chosen

COLOURS = ["red", "light blue", "Green", "the colour yellow"]


def asked(answer: str | None, **extra: object) -> Prompt:
    return Prompt(id="quiz/7", messages=(), domain="quiz", answer=answer, extra=extra)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        (" B. ", "B"),
        ("B)", "B"),
        ("(B)", "B"),
        ("[B]", "B"),
        ("**B**", "B"),
        ("(b)", "B"),
        ("Answer: B", "B"),
        ("Answer: (B)", "B"),
        ("answer: b", "B"),
        ("**Answer:** B", "B"),
        ("**Answer: B**", "B"),
        ("The answer is B", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B).", "B"),
        ("the answer is b.", "B"),
        ("The correct answer is B because water boils.", "B"),
        ("The correct option is C", "C"),
        ("The answer is option D.", "D"),
        ("Therefore the answer to the question is: D", "D"),
        (r"\boxed{B}", "B"),
        (r"so $\boxed{\text{B}}$.", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{\textbf{(C)}}", "C"),
        (r"\boxed{A} is wrong, I mean \boxed{C}", "C"),
        ("Answer: A. No, wait. Answer: C", "C"),
        ("The answer is B. (A) fails because it is too small.", "B"),
        ("A dog cannot fly, so I choose (D)", "D"),
        ("We rule out (A) and (C), which leaves (B)", "B"),
        ("Thinking about it...\nB. because it fits", "B"),
        ("Thinking about it...\n\nC", "C"),
        ("The answer is not B but C", "C"),
        ("The answer is C, as shown", "C"),
        ("The answer is shown below: (B)", "B"),
        ("B. light blue", "B"),
        ("The answer is A or B", None),
        ("The answer is A, B", None),
        ("The answer is A/B", None),
        ("Answer: (A) and (C)", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A} or \boxed{B}", None),
        (r"\boxed{}", None),
        (r"\boxed{B", None),
        ("A dog", None),
        ("The answer is a mistake", None),
        ("I am not sure", None),
        ("f(a) is small", None),
        ("E", None),
        ("The answer is Z", None),
        ("BBB", None),
        ("", None),
        ("?", None),
    ],
)
def test_a_text_settles_on_the_letter_a_reader_would_name(text: str, letter: str | None) -> None:
    assert chosen(text, letters="ABCD") == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("light blue", "B"),
        ("Light Blue.", "B"),
        ("The answer is light blue.", "B"),
        ("The answer is light blue because of the sky", "B"),
        (r"\boxed{\text{light blue}}", "B"),
        ("B. light blue", "B"),
        ("(B) light blue", "B"),
        ("Answer: B) light blue", "B"),
        ("green", "C"),
        ("colour yellow", "D"),
        ("B. red", "B"),
        ("Answer: dark blue", None),
        ("blue", None),
        ("reddish", None),
    ],
)
def test_the_words_of_an_option_stand_for_its_letter(text: str, letter: str | None) -> None:
    assert chosen(text, letters="ABCD", options=COLOURS) == letter


def test_a_list_of_letters_and_a_denied_one_name_no_choice() -> None:
    for text in ("A B C D", "(A) (B) (C) (D)", "A, B", "Either A or B", "A\nB\nC", "It is not A or B."):
        assert chosen(text, letters="ABCD") is None, text
    for text in ("The answer is not A.", "It isn't (A)", "so it can't be option A", "Not A"):
        assert chosen(text, letters="ABCD") is None, text
    for text in (
        "It is not A. It is C.",
        "Not (A) or (B), so (C)",
        "A. red\nB. blue\nso C",
        "The answer is not A. The answer is C.",
    ):
        assert chosen(text, letters="ABCD") == "C", text


def test_options_come_as_a_list_or_by_letter_and_set_the_letters() -> None:
    reward = Choice(ChoiceConfig(kind="choice", correct=2.0, wrong=-1.0))
    assert reward(asked("B", options=COLOURS), said("light blue")).value == 2.0
    assert reward(asked("light blue", options=COLOURS), said("(B)")).value == 2.0
    assert reward(asked("A", options={"B": "no", "A": "yes"}), said("yes")).value == 2.0
    assert reward(asked("B", options=["x", "y"]), said("C")).value == -1.0
    assert reward(asked("b"), said("The answer is B")).value == 2.0
    assert (
        Choice(ChoiceConfig(kind="choice", options_key="choices"))(asked("A", choices=["up", "down"]), said("up")).value == 1.0
    )


def test_a_pattern_chooses_the_part_that_is_read() -> None:
    reward = Choice(ChoiceConfig(kind="choice", pattern="<answer>(.*?)</answer>"))
    assert reward(asked("B"), said("(A)? <answer>B</answer> (C)")).value == 1.0
    assert reward(asked("B"), said("The answer is B")).value == 0.0


@pytest.mark.parametrize("answer", ["Q", "42", "", "A or B"])
def test_a_reference_that_is_no_choice_names_its_row(answer: str) -> None:
    with pytest.raises(RewardError, match="quiz/7 is no choice of A to D"):
        Choice(ChoiceConfig(kind="choice", num_options=4))(asked(answer), said("A"))


def test_a_row_without_a_reference_says_so() -> None:
    with pytest.raises(RewardError, match="quiz/7 has no reference answer"):
        Choice(ChoiceConfig(kind="choice"))(asked(None), said("A"))


@given(st.text())
def test_any_text_has_a_score_and_one_without_letters_is_wrong(text: str) -> None:
    reward = Choice(ChoiceConfig(kind="choice"))
    assert reward(asked("C"), said(text)).value in (0.0, 1.0)
    assert reward(asked("C"), said("".join(character for character in text if character not in "cC"))).value == 0.0
