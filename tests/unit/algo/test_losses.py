import inspect
from typing import get_args

import numpy as np
import pytest
import torch

from reroll.algo.losses import LOSSES, ppo, reinforce
from reroll.config.algorithm import LossConfig


@pytest.mark.parametrize("seed", range(4))
def test_ppo_is_the_clipped_surrogate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, old_logp, advantage = rng.normal(size=(3, 200))
    ratio = np.exp(logp - old_logp)
    expected = np.where(advantage >= 0, -advantage * np.minimum(ratio, 1.3), -advantage * np.maximum(ratio, 0.9))
    loss = ppo(*map(torch.tensor, (logp, old_logp, advantage)), clip_low=0.1, clip_high=0.3)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # inside the range: -ratio * A
        (1.5, 2.0, 0.0),  # already far enough up
        (0.5, 2.0, -1.0),  # too low but should rise: still pulled
        (0.5, -2.0, 0.0),  # already far enough down
        (1.5, -2.0, 3.0),  # too high and should fall: still pushed
    ],
)
def test_ppo_has_no_gradient_only_where_the_ratio_went_too_far_the_way_the_advantage_wants(
    ratio: float, advantage: float, expected: float
) -> None:
    logp = torch.tensor([np.log(ratio)], requires_grad=True)
    ppo(logp, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2).sum().backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(expected, abs=1e-6)


def test_ppo_at_ratio_one_has_the_gradient_of_reinforce() -> None:
    advantage = torch.randn(50, generator=torch.Generator().manual_seed(0))
    gradients = []
    for loss, options in ((ppo, {"clip_low": 0.2, "clip_high": 0.2}), (reinforce, {})):
        logp = torch.full((50,), -1.5, requires_grad=True)
        loss(logp, logp.detach(), advantage, **options).sum().backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_reinforce_is_minus_advantage_times_logp() -> None:
    loss = reinforce(torch.tensor([-1.0, -2.0]), torch.zeros(2), torch.tensor([3.0, -0.5]))
    assert loss.tolist() == [3.0, -1.0]


def test_every_configured_loss_has_a_function_that_takes_its_options() -> None:
    by_kind = {get_args(node.model_fields["kind"].annotation)[0]: node for node in get_args(get_args(LossConfig)[0])}
    assert by_kind.keys() == LOSSES.keys()
    for kind, node in by_kind.items():
        options = list(inspect.signature(LOSSES[kind]).parameters)[3:]
        assert set(options) == node.model_fields.keys() - {"kind"}
