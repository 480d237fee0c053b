"""reasoning-gym behind the Env seam."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from reroll.envs.adapters.reasoning_gym import ReasoningGym
from reroll.errors import EnvError

SUM: dict[str, Any] = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}


def solve(question: str) -> str:
    """The answer to a chain of two numbers."""
    left, sign, right = re.findall(r"\d+|[+-]", question.split(":")[-1])[:3]
    return str(int(left) + int(f"{sign}{right}"))


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_the_right_answer_ends_the_episode_with_reward_1(seed: int) -> None:
    env = ReasoningGym(**SUM)
    (question,) = env.reset(seed)
    end = env.step(f" {solve(question['content'])}\n")
    assert (end.reward, end.terminated, end.messages, end.info["success"]) == (1.0, True, (), 1.0)


def test_a_wrong_answer_ends_a_single_attempt_with_the_verifiers_score() -> None:
    env = ReasoningGym(**SUM)
    env.reset(0)
    end = env.step("I do not know")
    assert end.terminated
    assert end.reward == end.info["score"] < 0.1
    assert end.info["success"] == 0.0
    with pytest.raises(EnvError, match="reset"):
        env.step("1")


def test_several_attempts_pay_only_the_last_one() -> None:
    env = ReasoningGym(**SUM, max_attempts=3)
    (question,) = env.reset(4)
    first, second = env.step("-1000"), env.step("-1001")
    assert [first.reward, second.reward] == [0.0, 0.0]
    assert first.messages[0]["content"] == "That is not right. Try again: 2 attempts left."
    assert second.messages[0]["content"] == "That is not right. Try again: 1 attempt left."
    assert first.state != second.state
    end = env.step(solve(question["content"]))
    assert (end.reward, end.terminated, end.info["success"]) == (1.0, True, 1.0)


def test_attempts_run_out() -> None:
    env = ReasoningGym(**SUM, max_attempts=2)
    env.reset(4)
    assert not env.step("-1000").terminated
    assert env.step("-1000").terminated


def test_seeds_choose_the_task() -> None:
    env = ReasoningGym(**SUM)
    questions = [env.reset(seed)[0]["content"] for seed in range(20)]
    assert [ReasoningGym(**SUM).reset(seed)[0]["content"] for seed in range(20)] == questions
    assert len(set(questions)) > 15


@pytest.mark.parametrize("options", [{"name": "no_such_task"}, {"name": "chain_sum", "options": {"no_such_option": 1}}])
def test_what_no_generator_takes_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot make tasks"):
        ReasoningGym(**options)
