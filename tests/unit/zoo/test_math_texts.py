from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.errors import RewardError
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.math.answer import final_answer
from reroll_zoo.math.verifier import MathConfig

pytest.importorskip("math_verify")

from reroll_zoo.math.verifier import Math


def asked(answer: str | None) -> Prompt:
    return Prompt(id="math/1", messages=(), domain="math", answer=answer)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.fixture(scope="module")
def reward() -> Math:
    return Math(MathConfig(kind="math"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{\sqrt{2}}{2}} done", r"\frac{\sqrt{2}}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed 7", "7"),
        (r"\fbox{7}", "7"),
        (r"first \boxed{1}, but then \boxed{2}", "2"),
        (r"\boxed{2} and that is all.", "2"),
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        (r"\boxed{5} \boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{1", None),
        (r"\boxed{1} no: \boxed{2", None),
        ("#### 42", "42"),
        ("7 * 6 = 42\n#### 42\n", "42"),
        ("The answer is 42.", "42"),
        ("The final answer is $42$. I hope it is correct.", "42"),
        ("**Final Answer:** 42", "42"),
        ("**Final Answer**: $\\frac{1}{2}$", r"\frac{1}{2}"),
        ("Final answer:\n\n\\[\n42\n\\]", "42"),
        ("The answer is 42 because 6 * 7 = 42, not 43", "42"),
        ("The answer is $2$ and $3$.", "2 and 3"),
        ("The answer to the question is 12 cm", "12 cm"),
        ("The answer is blue.", "blue"),
        ("Answer: 3 or 4", "3 or 4"),
        ("answer = 7", "7"),
        ("So the total is $3 + 4 = 7$, as required.", "3 + 4 = 7"),
        ("so we get 3x + 2.", "3x + 2"),
        ("First 7, then 42", "42"),
        ("There are 3 cats and 4 dogs", "4"),
        ("x = 5", "x = 5"),
        (r"\frac{3}{4}", r"\frac{3}{4}"),
        ("(3, 4)", "(3, 4)"),
        ("We find\n\\[ x = 5 \\]\nas wanted", "x = 5"),
        ("It is Tuesday", "It is Tuesday"),
        ("", None),
        ("\n \n", None),
    ],
)
def test_the_final_answer_is_what_a_reader_would_take_it_to_be(text: str, answer: str | None) -> None:
    assert final_answer(text, require_boxed=False) == answer


@pytest.mark.parametrize(
    ("gold", "text", "is_correct"),
    [
        # Which of several statements counts.
        ("5", r"\boxed{5} is wrong, I mean \boxed{6}", False),
        ("6", r"\boxed{5} is wrong, I mean \boxed{6}", True),
        ("5", r"The answer is \boxed{5}. Note that \boxed{7} would be wrong", False),
        ("5", r"\boxed{4} or \boxed{5}", False),
        ("5", r"\boxed{5}, \boxed{4}, \boxed{6}", False),
        ("5", r"\boxed{4 \text{ or } 5}", False),
        ("5", r"\boxed{1,2,3,4,5}", False),
        ("5", r"\boxed{x=5 \text{ or } x=6}", False),
        ("5", r"so \boxed{5} in the middle of a longer text that says 12 later on", True),
        ("5", r"The answer is 5, I think \boxed{12}", False),
        ("5", r"\boxed{\boxed{5}}", True),
        ("5", r"\boxed{5", False),
        ("12", r"the answer is 12, so \boxed{1", False),
        ("5", r"\boxed{}5", False),
        ("5", r"5 \boxed{}", False),
        ("5", r"\boxed{5}}}}", True),
        ("5", r"\\boxed{5}", True),
        ("6", "boxed{6} 5", True),
        ("5", "The answer is 4, not 5", False),
        ("5", "The answer is 5, not 4", True),
        # What is denied is no answer.
        ("5", "The answer is not 5.", False),
        ("5", "The answer is not 5, it is 6.", False),
        ("6", "The answer is not 5, it is 6.", True),
        ("5", "The answer is not 4 but 5", True),
        ("5", "It is not 5.", False),
        ("5", "So x is not equal to 5.", False),
        ("5", "It isn't 4, it's 5", True),
        (r"\frac12", r"The answer is not $\frac12$.", False),
        # Answers that quote the reference, or a rule for it, without committing to it.
        ("5", r"\boxed{5 \neq 6}", False),
        ("5", r"\boxed{\text{the answer is not } 5}", False),
        ("5", r"\boxed{5 \text{ or anything else}}", False),
        ("5", r"\boxed{5 \text{ but not really}}", False),
        ("5", r"\boxed{[0, 10]}", False),
        ("5", r"\boxed{x \in \mathbb{R}}", False),
        ("5", r"\boxed{x > 4}", False),
        ("5", r"\boxed{5x}", False),
        ("5", r"\boxed{x}", False),
        ("5", r"\boxed{n}", False),
        ("5", r"\boxed{\text{gold}}", False),
        ("5", r"\boxed{\infty}", False),
        ("5", r"\boxed{5+0i}", True),
        ("5", r"\boxed{5 + \epsilon}", False),
        # Division by zero and other things that are nothing.
        ("5", r"\boxed{\frac{5}{0}}", False),
        ("5", r"\boxed{5/0}", False),
        ("5", r"\boxed{\frac{0}{0}}", False),
        ("0", r"\boxed{\frac{0}{0}}", False),
        ("5", r"\boxed{\text{NaN}}", False),
        ("5", r"\boxed{\log 0}", False),
        ("5", r"\boxed{\frac{5}{}}", False),
        ("5", r"\boxed{+-*/}", False),
        # Unicode.
        ("5", r"\boxed{５}", True),
        ("5", "\\boxed{\u200b5\u200b}", True),
        ("5", r"\boxed{٥}", True),
        ("5", r"\boxed{Ⅴ}", False),
        ("5", r"\boxed{5️⃣}", False),
        ("5", "\\boxed{\x00}", False),
        ("5", "\\boxed{\ud800}", False),
        # LaTeX that does nothing, or should do nothing.
        ("5", r"\boxed{\left.5\right.}", False),
        ("5", r"\boxed{\color{red}{5}}", False),
        ("5", r"\boxed{\phantom{6}5}", True),
        ("5", r"\boxed{\displaystyle 5}", True),
        ("5", r"\boxed{\input{/etc/passwd}}", False),
        ("5", r"\boxed{\def\x{5}\x}", False),
        ("5", r"\boxed{__import__('os').getpid()}", False),
        ("5", r"\boxed{exit()}", False),
    ],
)
def test_tricks_earn_what_they_deserve(reward: Math, gold: str, text: str, is_correct: bool) -> None:
    assert reward(asked(gold), said(text)).value == float(is_correct)


MONSTERS = {
    "tower": "9^{9^{9^{9}}}",
    "flat tower": "9^9^9^9^9",
    "plain tower": "9**9**9**9",
    "power": "7^{100000000}",
    "negative power": "7^{-100000000}",
    "exponent": "1e999999999",
    "power of ten": r"1 \times 10^{999999999}",
    "factorial": "100000000!",
    "factorials": "((9!)!)!",
    "many factorials": "9!!!!!!!",
    "binomial": r"\binom{100000000}{50000000}",
    "sum": r"\sum_{k=1}^{1000000000} \frac{1}{k^2}",
    "product": r"\prod_{k=1}^{1000000000} k",
    "long number": "9" * 100_000,
    "long decimal": "0." + "0" * 100_000 + "1",
    "long text": "x + " * 100_000,
    "long list": ", ".join(str(number) for number in range(5000)),
    "round brackets": "(" * 5000 + "5" + ")" * 5000,
    "braces": "{" * 5000 + "5" + "}" * 5000,
    "brackets": "[" * 14 + "5" + "]" * 14,
    "fractions": r"\frac{1}{" * 500 + "5" + "}" * 500,
    "roots": r"\sqrt{" * 500 + "5" + "}" * 500,
    "minus signs": "-" * 901 + "5",
    "polynomial": "(x+1)^{100}" * 12,
    "many symbols": "+".join("abcdfghjklmnpqrstuvwxyz"),
    "backslashes": "\\" * 900,
    "dollars": "$" * 900,
    "commas": "," * 900,
    "signs of equality": "=" * 900,
    "chain": "=".join(["x"] * 300),
    "and": " and " * 200,
    "spaces": " " * 900 + "4",
    "period": "0." + "3" * 900 + "...",
    "text commands": r"\text{" * 150,
    "texts": r"\text{a}" * 120,
    "boxes": r"\boxed{" * 300 + "4" + "}" * 300,
    "plus minus": r"\pm" * 300,
    "unions": r"\cup" * 200,
    "matrix": r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}",
    "nested trigonometry": r"\sin(" * 11 + "x" + ")" * 11,
    "integral": r"\int_0^1 \sin(\sin(\sin(x))) dx",
    "limit": r"\lim_{x \to 0} \frac{\sin x}{x}",
}


@pytest.mark.parametrize("gold", ["5", "x^2+1", r"\{1, \sqrt{2}\}"])
def test_a_monstrous_answer_is_wrong_and_costs_little_work(reward: Math, gold: str) -> None:
    for name, monster in MONSTERS.items():
        start_s = time.process_time()
        assert reward(asked(gold), said(rf"So \boxed{{{monster}}}")).value == 0.0, name
        assert reward(asked(gold), said(f"so the answer is {monster}")).value == 0.0, name
        # Seconds at most on a slow machine; without the guards it would be for ever.
        assert time.process_time() - start_s < 60.0, name


def test_many_boxes_and_much_text_are_read(reward: Math) -> None:
    assert reward(asked("5"), said(r"\boxed{" * 50_000 + "5")).value == 0.0
    assert reward(asked("5"), said(r"\boxed{4} " * 50_000 + r"\boxed{5}")).value == 0.0
    assert reward(asked("5"), said("the answer is 4 and $ " * 50_000 + "\nthe answer is 5")).value == 1.0


def test_equal_answers_are_reported_in_one_writing(reward: Math) -> None:
    right = {
        reward(asked("0.5"), said(rf"\boxed{{{answer}}}")).answer
        for answer in ("1/2", r"\frac{2}{4}", "x=0.5", r"\sin 30^\circ")
    }
    wrong = {reward(asked("7"), said(rf"\boxed{{{answer}}}")).answer for answer in ("1/2", "0.50", "x = .5", "0.5 cm")}
    assert len(right) == 1
    assert wrong == {"1/2"}
    assert reward(asked("7"), said("")).answer is None


def test_only_boxed_answers_count_where_a_box_is_required() -> None:
    strict = Math(MathConfig(kind="math", require_boxed=True, correct=2.0, wrong=-1.0))
    assert strict(asked("5"), said(r"\boxed{5}")).value == 2.0
    assert strict(asked("5"), said("The answer is 5")).value == -1.0
    assert strict(asked("5"), said("5")).value == -1.0


def test_a_pattern_chooses_the_part_that_is_read() -> None:
    tagged = Math(MathConfig(kind="math", pattern="(?s)<answer>(.*?)</answer>"))
    assert tagged(asked(r"\frac{1}{2}"), said(r"\boxed{3} <answer>0.5</answer>")).value == 1.0
    assert tagged(asked(r"\frac{1}{2}"), said(r"<answer>so \boxed{0.5}</answer>")).value == 1.0
    assert tagged(asked(r"\frac{1}{2}"), said("0.5")).value == 0.0


def test_tolerance_is_relative_and_forgives_decimals_only() -> None:
    rough = Math(MathConfig(kind="math", tolerance=0.01))
    assert rough(asked(r"\pi"), said(r"\boxed{3.14}")).value == 1.0
    assert rough(asked(r"\frac{2}{3}"), said(r"\boxed{0.67}")).value == 1.0
    assert rough(asked("1000"), said(r"\boxed{1001.5}")).value == 1.0
    assert rough(asked("1000"), said(r"\boxed{1001}")).value == 0.0
    assert rough(asked(r"\pi"), said(r"\boxed{\frac{22}{7}}")).value == 0.0
    assert rough(asked(r"\pi"), said(r"\boxed{3.2}")).value == 0.0
    exact = Math(MathConfig(kind="math", tolerance=0.0))
    assert exact(asked("0.5"), said(r"\boxed{1/2}")).value == 1.0
    assert exact(asked(r"\frac{1}{3}"), said(r"\boxed{0.3333333333}")).value == 0.0


@pytest.mark.parametrize(
    "answer", ["", "  ", "$$", r"\frac{1}{", r"\frac{1}{0}", "9^{9^{9^{9}}}", "1" * 2000, "x +* 2 = )", r"\boxed{}"]
)
def test_a_reference_that_is_no_mathematics_names_its_row(reward: Math, answer: str) -> None:
    with pytest.raises(RewardError, match=r"prompt math/1 cannot be read as mathematics.*use reward kind exact"):
        reward(asked(answer), said(r"\boxed{5}"))


def test_a_row_without_a_reference_says_so(reward: Math) -> None:
    with pytest.raises(RewardError, match="math/1 has no reference answer"):
        reward(asked(None), said("5"))


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_any_text_has_a_score(reward: Math, text: str) -> None:
    assert reward(asked(r"\frac{271}{828}"), said(text)).value == 0.0
    assert reward(asked(r"\frac{271}{828}"), said(rf"\boxed{{{text}}}")).value == 0.0


PIECES = [
    *"0123456789xyzie+-*/^=()[]{},.!%|_ ",
    r"\frac",
    r"\sqrt",
    r"\{",
    r"\}",
    r"\pi",
    r"\pm",
    r"\cup",
    r"\infty",
    r"\sin",
    r"\text",
    r"\\",
    "&",
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_broken_mathematics_has_a_score(reward: Math, text: str) -> None:
    assert reward(asked(r"7\sqrt{11}"), said(rf"\boxed{{{text}}}")).value in (0.0, 1.0)


def test_sympy_is_loaded_only_when_a_math_reward_is_made() -> None:
    code = "import sys, reroll_zoo.math.verifier; sys.exit(bool({'sympy', 'math_verify'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
