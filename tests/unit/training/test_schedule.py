import math

import pytest

from reroll.config.parts import OptimConfig
from reroll.training.optimizer import learning_rate


def rates(total_steps: int, **optim: object) -> list[float]:
    config = OptimConfig.model_validate({"lr": 1.0} | optim)
    return [learning_rate(step, config, total_steps=total_steps) for step in range(total_steps)]


def test_a_constant_rate_stays() -> None:
    assert rates(4) == [1.0] * 4


def test_warm_up_rises_in_equal_steps_and_never_starts_at_zero() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_minimum() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(6, schedule="linear", warmup_steps=1) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_decay_follows_half_a_wave() -> None:
    expected = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert rates(5, schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_steps_after_the_last_keep_the_minimum(schedule: str) -> None:
    config = OptimConfig.model_validate({"lr": 2.0, "schedule": schedule, "min_lr_ratio": 0.1})
    assert learning_rate(50, config, total_steps=10) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_uses_the_full_rate(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [1.0]
