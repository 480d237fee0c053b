import json

import numpy as np
import pytest
import torch

from reroll.algo.shaping import RunningMoments


def test_moments_over_steps_are_those_of_all_rewards_together() -> None:
    steps = [np.random.default_rng(step).normal(1e3, 0.1, size=step) for step in range(1, 9)]
    moments = RunningMoments()
    for step in steps:
        moments.update(torch.tensor(step))
    rewards = np.concatenate(steps)
    assert moments.count == len(rewards)
    assert moments.mean == pytest.approx(rewards.mean(), rel=1e-12)
    assert moments.std == pytest.approx(rewards.std(ddof=1), rel=1e-9)


def test_fewer_than_two_rewards_have_no_deviation() -> None:
    moments = RunningMoments()
    moments.update([])
    assert (moments.mean, moments.std) == (0.0, 0.0)
    moments.update([0.7])
    assert (moments.mean, moments.std) == (0.7, 0.0)


def test_equal_rewards_have_exactly_no_deviation() -> None:
    moments = RunningMoments()
    moments.update([0.1] * 100)
    assert (moments.mean, moments.std) == (0.1, 0.0)


def test_restored_moments_go_on_where_they_stopped() -> None:
    whole, half = RunningMoments(), RunningMoments()
    whole.update([1.0, 2.0, 4.0])
    half.update([1.0, 2.0])
    restored = RunningMoments()
    restored.restore(json.loads(json.dumps(half.state())))
    restored.update([4.0])
    assert restored.state() == whole.state()
