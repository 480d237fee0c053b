from __future__ import annotations

from typing import Any

import pytest

from reroll.config.rewards import ReasoningGymReward
from reroll.rewards.reasoning_gym import ReasoningGym
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn

reasoning_gym = pytest.importorskip("reasoning_gym")
DATASETS = pytest.importorskip("reasoning_gym.factory").DATASETS
MANY_SOLUTIONS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks without a reference answer: any solution that works is right."""
NAMES = sorted(set(DATASETS) - {"composite"})
FORMAT_CREDIT = 0.2
"""What a scorer may give to an answer that has the form and nothing else."""


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.fixture(scope="module")
def reward() -> ReasoningGym:
    return ReasoningGym(ReasoningGymReward(kind="reasoning_gym"))


def rows(name: str) -> list[tuple[Prompt, Any]]:
    generator = reasoning_gym.create_dataset(name, size=3, seed=11)
    tasks = [{"name": name, "options": {}, "entry": entry} for entry in (generator[0], generator[1], generator[2])]
    return [
        (Prompt(id=f"{name}/{i}", messages=(), domain="logic", extra={"reasoning_gym": task}), task["entry"]["answer"])
        for i, task in enumerate(tasks)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_every_generator_earns_all_and_nonsense_next_to_nothing(reward: ReasoningGym, name: str) -> None:
    for prompt, answer in rows(name):
        if name in MANY_SOLUTIONS:
            assert answer is None
        else:
            assert reward(prompt, said(answer)).value == 1.0
        for nonsense in ("", " ", "qzx garbage ???", "-987654321.125", "nan", "{}", "[[[", "1e999"):
            assert 0.0 <= reward(prompt, said(nonsense)).value <= FORMAT_CREDIT, nonsense


def test_a_yes_or_no_task_does_not_pay_for_the_wrong_one(reward: ReasoningGym) -> None:
    for prompt, answer in rows("game_of_life_halting"):
        assert reward(prompt, said("False" if answer == "True" else "True")).value == 0.0
        assert reward(prompt, said(answer.lower())).value == 1.0


def test_a_probability_of_zero_is_no_pass_for_every_coin_flip(reward: ReasoningGym) -> None:
    for prompt, _ in rows("coin_flip"):
        assert reward(prompt, said("0")).value == 0.0
        assert reward(prompt, said("0.000")).value == 0.0
