"""reasoning-gym behind the Env seam."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from reroll.errors import EnvError
from reroll_zoo.reasoning_gym.config import ReasoningGymEnvConfig
from reroll_zoo.reasoning_gym.env import ReasoningGymEnv

SUM: dict[str, Any] = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}


def solve(question: str) -> str:
    """The answer to a chain of two numbers."""
    left, sign, right = re.findall(r"\d+|[+-]", question.split(":")[-1])[:3]
    return str(int(left) + int(f"{sign}{right}"))


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_the_right_answer_ends_the_episode_with_reward_1(seed: int) -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(**SUM))
    (question,) = env.reset(seed)
    end = env.step(f" {solve(question['content'])}\n")
    assert (end.reward, end.terminated, end.messages, end.info["success"]) == (1.0, True, (), 1.0)


def test_a_wrong_answer_ends_a_single_attempt_with_the_verifiers_score() -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(**SUM))
    env.reset(0)
    end = env.step("I do not know")
    assert end.terminated
    assert end.reward == end.info["score"] < 0.1
    assert end.info["success"] == 0.0
    with pytest.raises(EnvError, match="reset"):
        env.step("1")


def test_several_attempts_pay_only_the_last_one() -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(**SUM, max_attempts=3))
    (question,) = env.reset(4)
    first, second = env.step("-1000"), env.step("-1001")
    assert [first.reward, second.reward] == [0.0, 0.0]
    assert first.messages[0]["content"] == "That is not right. Try again: 2 attempts left."
    assert second.messages[0]["content"] == "That is not right. Try again: 1 attempt left."
    assert first.state != second.state
    end = env.step(solve(question["content"]))
    assert (end.reward, end.terminated, end.info["success"]) == (1.0, True, 1.0)


def test_attempts_run_out() -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(**SUM, max_attempts=2))
    env.reset(4)
    assert not env.step("-1000").terminated
    assert env.step("-1000").terminated


def test_seeds_choose_the_task() -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(**SUM))
    questions = [env.reset(seed)[0]["content"] for seed in range(20)]
    assert [ReasoningGymEnv(ReasoningGymEnvConfig(**SUM)).reset(seed)[0]["content"] for seed in range(20)] == questions
    assert len(set(questions)) > 15


@pytest.mark.parametrize("options", [{"name": "no_such_task"}, {"name": "chain_sum", "options": {"no_such_option": 1}}])
def test_what_no_generator_takes_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot make tasks"):
        ReasoningGymEnv(ReasoningGymEnvConfig(**options))


@pytest.mark.parametrize(
    ("name", "answer"),
    [("coin_flip", "0"), ("coin_flip", "0/1"), ("game_of_life_halting", "whatever"), ("complex_arithmetic", "nan")],
)
def test_scorers_that_pay_for_nothing_are_held_off_as_in_the_reward(name: str, answer: str) -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(name=name))
    for seed in range(10):
        env.reset(seed)
        assert env.step(answer).reward == 0.0


def test_an_answer_that_its_scorer_runs_does_nothing_here_and_nothing_to_the_next(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    scorers = "__import__('reasoning_gym').algorithmic.spiral_matrix.SpiralMatrixDataset"
    attacks = (
        f"[open({str(mark)!r}, 'w').write('x')]",
        f"[__import__('os').system('touch {mark}')]",
        f"[setattr({scorers}, 'score_answer', lambda s, a, e: 1.0)]",
    )
    env = ReasoningGymEnv(ReasoningGymEnvConfig(name="spiral_matrix"))
    for seed, attack in enumerate([*attacks, "wrong"]):
        env.reset(seed)
        assert env.step(attack).reward == 0.0
    assert not mark.exists()
