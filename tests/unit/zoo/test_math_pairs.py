from __future__ import annotations

from pathlib import Path

import pytest

from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.math.verifier import MathConfig

pytest.importorskip("math_verify")

from reroll_zoo.math.verifier import Math


def read_pairs() -> list[tuple[str, str, bool]]:
    """Reference, boxed answer, and whether a careful grader takes one for the other."""
    lines = (Path(__file__).parent / "data" / "math_pairs.txt").read_text(encoding="utf-8").splitlines()
    pairs = []
    for line in lines:
        if line and not line.startswith("# "):
            sign = "  ==  " if "  ==  " in line else "  !=  "
            gold, answer = line.split(sign)
            pairs.append((gold, answer, sign == "  ==  "))
    return pairs


PAIRS = read_pairs()
GOLDS = sorted({gold for gold, _, _ in PAIRS})


def asked(answer: str | None) -> Prompt:
    return Prompt(id="math/1", messages=(), domain="math", answer=answer)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.fixture(scope="module")
def reward() -> Math:
    return Math(MathConfig(kind="math"))


def test_a_boxed_answer_is_graded_as_a_careful_reader_would(reward: Math) -> None:
    misjudged = [
        f"{gold}  {'==' if is_correct else '!='}  {answer}"
        for gold, answer, is_correct in PAIRS
        if reward(asked(gold), said(rf"Adding up, we get \boxed{{{answer}}}.")).value != float(is_correct)
    ]
    assert not misjudged


def test_every_reference_equals_itself_however_it_is_presented(reward: Math) -> None:
    for gold in GOLDS:
        for text in (rf"\boxed{{{gold}}}", rf"$$\boxed{{{gold}}}$$", rf"The answer is \({gold}\).", f"So\n\\[\n{gold}\n\\]"):
            assert reward(asked(gold), said(text)).value == 1.0, text
        for wrapped in (rf"Some reasoning. \boxed{{{gold}}}", f"So it is that.\n#### {gold}"):
            assert reward(asked(wrapped), said(rf"\boxed{{{gold}}}")).value == 1.0, wrapped


@pytest.mark.parametrize(
    "text", ["", " ", r"\boxed{}", "I do not know.", r"\boxed{?}", r"\boxed{\text{nothing}}", r"\boxed{", "Ω≈ç√∫"]
)
def test_every_reference_is_missed_by_an_empty_answer_and_by_garbage(reward: Math, text: str) -> None:
    assert not [gold for gold in GOLDS if reward(asked(gold), said(text)).value != 0.0]
