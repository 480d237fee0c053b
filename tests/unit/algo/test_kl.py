from typing import get_args

import numpy as np
import pytest
import torch

from reroll.algo.kl import KL_ESTIMATORS, k1, k2, k3
from reroll.config.algorithm import KlConfig

PROBS, REF_PROBS = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.3, 0.2, 0.1])


def test_the_estimators_follow_their_formulas() -> None:
    logp, ref_logp = np.random.default_rng(0).normal(size=(2, 100))
    difference = logp - ref_logp
    expected = {"k1": difference, "k2": difference**2 / 2, "k3": np.exp(-difference) - 1 + difference}
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


def test_k2_and_k3_are_never_negative() -> None:
    logp, ref_logp = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (k2(logp, ref_logp) >= 0).all()
    assert (k3(logp, ref_logp) >= -1e-6).all()


def test_every_configured_estimator_has_a_function() -> None:
    assert set(get_args(KlConfig.model_fields["estimator"].annotation)) == KL_ESTIMATORS.keys()
