import math
from typing import get_args

import numpy as np
import pytest
import torch

from reroll.algo.kl import KL_ESTIMATORS, absolute, adapted_coef, k1, k2, k3, low_variance
from reroll.config.losses import KlEstimator

PROBS, REF_PROBS = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.3, 0.2, 0.1])


def test_the_estimators_follow_their_formulas() -> None:
    logp, ref_logp = 2 * np.random.default_rng(0).normal(size=(2, 100))
    difference = logp - ref_logp
    exact = np.exp(-difference) - 1 + difference
    assert exact.max() > 10
    expected = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": exact,
        "low_variance": np.minimum(exact, 10),
        "abs": np.abs(difference),
    }
    assert expected.keys() == KL_ESTIMATORS.keys()
    for name, estimator in KL_ESTIMATORS.items():
        np.testing.assert_allclose(estimator(torch.tensor(logp), torch.tensor(ref_logp)).numpy(), expected[name], atol=1e-12)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_average_to_the_true_kl_over_the_policys_own_tokens(estimator) -> None:  # type: ignore[no-untyped-def]
    true_kl = float((PROBS * np.log(PROBS / REF_PROBS)).sum())
    values = estimator(torch.tensor(np.log(PROBS)), torch.tensor(np.log(REF_PROBS))).numpy()
    assert float((PROBS * values).sum()) == pytest.approx(true_kl, rel=1e-12)


def test_differentiated_through_logp_k2_pulls_like_the_true_kl_and_k1_not_at_all() -> None:
    scores = torch.tensor(np.log(PROBS), requires_grad=True)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, scores, retain_graph=True)[0]

    logp, ref_logp = scores.log_softmax(0), torch.tensor(np.log(REF_PROBS))
    weights = torch.tensor(PROBS)
    true_gradient = gradient((logp.exp() * (logp - ref_logp)).sum())
    torch.testing.assert_close(gradient((weights * k2(logp, ref_logp)).sum()), true_gradient)
    torch.testing.assert_close(gradient((weights * k1(logp, ref_logp)).sum()), torch.zeros_like(scores))


@pytest.mark.parametrize("estimator", [k2, k3, low_variance, absolute])
def test_all_but_k1_are_never_negative(estimator) -> None:  # type: ignore[no-untyped-def]
    logp, ref_logp = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (estimator(logp, ref_logp) >= -1e-6).all()


def test_low_variance_bounds_value_and_gradient_where_k3_explodes() -> None:
    logp = torch.tensor([-300.0, -3.0, -0.1, -1.0], requires_grad=True)
    ref_logp = torch.tensor([-0.1, -0.1, -300.0, -1.2])
    assert k3(logp, ref_logp)[0].isinf()
    values = low_variance(logp, ref_logp)
    gradient = torch.autograd.grad(values.sum(), logp)[0]
    assert values[:3].tolist() == [10.0, 10.0, 10.0]
    assert gradient[:3].tolist() == [0.0, 0.0, 0.0]
    assert gradient[3].item() == pytest.approx(1 - np.exp(-0.2), rel=1e-5)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 256 / 10_000)),  # 10 % above
        (60.0, 0.1 * (1 + 0.2 * 256 / 10_000)),  # far above: 20 % at most
        (0.0, 0.1 * (1 - 0.2 * 256 / 10_000)),  # far below
    ],
)
def test_the_coefficient_follows_the_measured_kl(kl: float, expected: float) -> None:
    assert adapted_coef(0.1, kl, target=6.0, horizon=10_000, num_samples=256) == pytest.approx(expected, rel=1e-12)


def test_a_step_of_more_samples_than_the_horizon_moves_the_coefficient_by_a_fifth_and_never_below_zero() -> None:
    assert adapted_coef(0.1, 0.0, target=6.0, horizon=10, num_samples=256) == pytest.approx(0.08)
    assert adapted_coef(0.1, math.inf, target=6.0, horizon=10, num_samples=256) == pytest.approx(0.12)


def test_a_kl_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        adapted_coef(0.1, math.nan, target=6.0, horizon=10_000, num_samples=256)


def test_every_configured_estimator_has_a_function() -> None:
    assert set(get_args(KlEstimator)) == KL_ESTIMATORS.keys()
