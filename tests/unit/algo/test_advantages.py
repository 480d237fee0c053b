import inspect
from typing import get_args

import numpy as np
import pytest
import torch

from reroll.algo.advantages import ADVANTAGES, group_mean, grpo
from reroll.config.algorithm import AdvantageConfig


@pytest.mark.parametrize("seed", range(5))
def test_grpo_is_the_reward_in_standard_deviations_from_the_group_mean(seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(size=3 + seed)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(grpo(torch.tensor(rewards), epsilon=1e-6).numpy(), expected, rtol=1e-12)


def test_group_mean_is_the_reward_above_the_group_mean() -> None:
    assert group_mean(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [0.0] * 8])
def test_a_group_of_one_or_of_equal_rewards_has_exactly_zero_advantage(rewards: list[float]) -> None:
    for advantage in (grpo(torch.tensor(rewards), epsilon=1e-6), group_mean(torch.tensor(rewards))):
        assert advantage.tolist() == [0.0] * len(rewards)


def test_every_configured_advantage_has_a_function_that_takes_its_options() -> None:
    configs = {node.model_fields["kind"].annotation: node for node in get_args(get_args(AdvantageConfig)[0])}
    by_kind = {get_args(annotation)[0]: node for annotation, node in configs.items()}
    assert by_kind.keys() == ADVANTAGES.keys()
    for kind, node in by_kind.items():
        options = list(inspect.signature(ADVANTAGES[kind]).parameters)[1:]
        assert set(options) == node.model_fields.keys() - {"kind"}
