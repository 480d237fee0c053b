"""Preference losses against the papers' equations written out as loops over single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll_zoo.offline.preference_config import PairLossConfig
from reroll_zoo.offline.preference_formulas import (
    PREFERENCES,
    bradley_terry,
    hinge,
    ipo,
    kto,
    kto_reference_point,
    log_odds,
    negative_log_likelihood,
    sigmoid,
    simpo,
)

MARGINS = [-30.0, -4.0, -0.7, 0.0, 0.3, 2.5, 9.0, 40.0]
OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.4},
    "hinge": {"beta": 0.3},
    "simpo": {"beta": 2.5, "gamma": 1.4},
    "orpo": {"beta": 0.6},
}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo_by_hand(h: float, beta: float, label_smoothing: float) -> float:
    """arXiv 2305.18290, equation 7, mixed with its mirror image as in the note on conservative DPO."""
    return -(1 - label_smoothing) * math.log(sigma(beta * h)) - label_smoothing * math.log(1 - sigma(beta * h))


def ipo_by_hand(h: float, beta: float) -> float:
    """arXiv 2310.12036, equation 17."""
    return (h - 1 / (2 * beta)) ** 2


def hinge_by_hand(h: float, beta: float) -> float:
    """arXiv 2309.06657, the hinge-norm loss."""
    return 1 - beta * h if beta * h < 1 else 0.0


def simpo_by_hand(h: float, beta: float, gamma: float) -> float:
    """arXiv 2405.14734, equation 6."""
    return -math.log(sigma(beta * h - gamma))


def orpo_by_hand(h: float, beta: float) -> float:
    """arXiv 2403.07691, equation 7 and the factor of equation 6."""
    return -beta * math.log(sigma(h))


BY_HAND: dict[str, Callable[..., float]] = {
    "sigmoid": dpo_by_hand,
    "ipo": ipo_by_hand,
    "hinge": hinge_by_hand,
    "simpo": simpo_by_hand,
    "orpo": orpo_by_hand,
}


def kto_by_hand(log_ratio: float, good: bool, z0: float, beta: float, weight_good: float, weight_bad: float) -> float:
    """arXiv 2402.01306, section 4: lambda - v(x, y)."""
    if good:
        return weight_good - weight_good * sigma(beta * (log_ratio - z0))
    return weight_bad - weight_bad * sigma(beta * (z0 - log_ratio))


def finite_differences(function: Callable[[Tensor], Tensor], at: list[float], *, step: float = 1e-6) -> np.ndarray:
    """d function(x)[i] / d x[i], for functions that treat entries one by one."""
    x = torch.tensor(at, dtype=torch.float64)
    return ((function(x + step) - function(x - step)) / (2 * step)).numpy()


def gradient(function: Callable[[Tensor], Tensor], at: list[float]) -> np.ndarray:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0].numpy()


def test_every_loss_of_pairs_has_a_config_and_the_other_way_round() -> None:
    nodes = {get_args(node.model_fields["kind"].annotation)[0]: node for node in get_args(PairLossConfig)}
    assert nodes.keys() == PREFERENCES.keys() == BY_HAND.keys()
    for kind, node in nodes.items():
        value = PREFERENCES[kind](torch.zeros(1), **node(kind=kind).options)
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("kind", PREFERENCES)
def test_a_loss_of_pairs_is_its_papers_equation(kind: str) -> None:
    ours = PREFERENCES[kind](torch.tensor(MARGINS, dtype=torch.float64), **OPTIONS[kind])
    np.testing.assert_allclose(ours, [BY_HAND[kind](h, **OPTIONS[kind]) for h in MARGINS], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_its_gradient_is_that_of_finite_differences(kind: str) -> None:
    def loss(margin: Tensor) -> Tensor:
        return PREFERENCES[kind](margin, **OPTIONS[kind])

    np.testing.assert_allclose(gradient(loss, MARGINS), finite_differences(loss, MARGINS), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_single_precision_neither_overflows_nor_loses_the_gradient_of_a_pair_far_on_the_wrong_side(kind: str) -> None:
    margin = torch.tensor([-3000.0], requires_grad=True)
    loss = PREFERENCES[kind](margin, **OPTIONS[kind])
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss).all()
    assert margin.grad is not None
    assert torch.isfinite(margin.grad).all()
    assert margin.grad.item() < -0.1


def test_a_policy_at_its_reference_has_the_loss_of_a_coin_toss() -> None:
    assert sigmoid(torch.zeros(1), beta=0.1).item() == pytest.approx(math.log(2))
    assert sigmoid(torch.zeros(1), beta=0.1, label_smoothing=0.3).item() == pytest.approx(math.log(2))


def test_labels_that_say_nothing_make_the_two_sides_equal() -> None:
    margin = torch.tensor([0.5, 2.0, 7.0])
    left, right = (sigmoid(sign * margin, beta=0.4, label_smoothing=0.5) for sign in (1, -1))
    torch.testing.assert_close(left, right)
    assert (left > math.log(2)).all(), "and a preference either way costs"


def test_ipo_pulls_a_margin_back_that_has_gone_beyond_its_goal_and_dpo_does_not() -> None:
    far = [100.0]
    assert gradient(lambda h: ipo(h, beta=0.1), far)[0] > 0
    assert gradient(lambda h: sigmoid(h, beta=0.1), far)[0] < 0
    assert ipo(torch.tensor([5.0]), beta=0.1).item() == pytest.approx(0, abs=1e-10)


def test_hinge_leaves_a_pair_alone_that_is_far_enough_apart() -> None:
    assert hinge(torch.tensor([10.0, 11.0]), beta=0.1).tolist() == [0, 0]
    assert gradient(lambda h: hinge(h, beta=0.1), [11.0])[0] == 0


def test_simpo_without_a_target_is_dpo_on_the_same_margin() -> None:
    margin = torch.tensor(MARGINS)
    torch.testing.assert_close(simpo(margin, beta=0.7, gamma=0.0), sigmoid(margin, beta=0.7))


LOG_PROBS = [-700.0, -40.0, -5.0, -1.0, -math.log(2), -0.3, -1e-2, -1e-5]


def odds_by_hand(logp: float) -> Decimal:
    """p / (1 - p), arXiv 2403.07691, equation 3, with four hundred digits."""
    with localcontext(prec=400):
        p = Decimal(logp).exp()
        return p / (1 - p)


def test_log_odds_are_the_logarithm_of_the_odds_and_so_is_their_gradient() -> None:
    with localcontext(prec=400):
        by_hand = [float(odds_by_hand(logp).ln()) for logp in LOG_PROBS]
        slopes = [float(1 / (1 - Decimal(logp).exp())) for logp in LOG_PROBS]
    np.testing.assert_allclose(log_odds(torch.tensor(LOG_PROBS, dtype=torch.float64)), by_hand, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(gradient(log_odds, LOG_PROBS), slopes, rtol=1e-10)


def test_log_odds_keep_the_digits_of_single_precision_for_rare_and_for_nearly_certain_answers() -> None:
    single = torch.tensor([-3000.0, -90.0, *LOG_PROBS, -1e-6, -3e-7], requires_grad=True)
    exact = single.detach().double().requires_grad_()
    for ours, expected in zip((log_odds(single), *_slope(single)), (log_odds(exact), *_slope(exact)), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-7)


def _slope(logp: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(log_odds(logp).sum(), logp)


def test_the_odds_of_an_answer_that_is_certain_are_large_and_finite_and_push_nowhere() -> None:
    logp = torch.tensor([0.0, -1e-9, -1e-7], requires_grad=True)
    odds = log_odds(logp)
    torch.testing.assert_close(odds.detach(), torch.full((3,), -math.log(torch.finfo(torch.float32).eps)))
    assert torch.equal(_slope(logp)[0], torch.zeros(3))


def test_the_negative_log_likelihood_is_per_token() -> None:
    nll = negative_log_likelihood(torch.tensor([-6.0, -1.0]), torch.tensor([3.0, 4.0]))
    assert nll.tolist() == [2.0, 0.25]


@pytest.mark.parametrize("reference_point", [0.0, 1.3])
def test_kto_is_its_papers_equation_and_so_is_its_gradient(reference_point: float) -> None:
    is_good = [True, False, True, False, True, False, True, False]

    def loss(log_ratio: Tensor) -> Tensor:
        return kto(
            log_ratio,
            torch.tensor(is_good),
            reference_point=reference_point,
            beta=0.2,
            desirable_weight=1.5,
            undesirable_weight=0.75,
        )

    by_hand = [kto_by_hand(r, good, reference_point, 0.2, 1.5, 0.75) for r, good in zip(MARGINS, is_good, strict=True)]
    np.testing.assert_allclose(loss(torch.tensor(MARGINS, dtype=torch.float64)), by_hand, rtol=1e-9)
    np.testing.assert_allclose(gradient(loss, MARGINS), finite_differences(loss, MARGINS), rtol=1e-5, atol=1e-9)


def test_kto_at_its_reference_costs_half_a_weight_and_pulls_good_and_bad_apart() -> None:
    options = {"reference_point": 0.0, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    is_good = torch.tensor([True, False])
    assert kto(torch.zeros(2), is_good, **options).tolist() == [0.5, 0.5]
    pull = gradient(lambda r: kto(r, is_good, **options), [0.0, 0.0])
    np.testing.assert_allclose(pull, [-0.025, 0.025])


def test_the_reference_point_of_kto_is_the_mean_log_ratio_but_never_below_zero() -> None:
    assert kto_reference_point(torch.tensor([1.0, 2.0, -0.5, 0.5])) == pytest.approx(0.75)
    assert kto_reference_point(torch.tensor([1.0, -2.0])) == 0.0


def test_ranking_without_a_margin_is_logistic_regression_on_the_difference_of_scores() -> None:
    """The cross-entropy of the label `chosen wins` under P = e^chosen / (e^chosen + e^rejected), arXiv 2203.02155."""
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(size=(2, 20))
    ours = bradley_terry(torch.tensor(chosen), torch.tensor(rejected), torch.zeros(20))
    by_hand = [-math.log(math.exp(c) / (math.exp(c) + math.exp(r))) for c, r in zip(chosen, rejected, strict=True)]
    np.testing.assert_allclose(ours, by_hand, rtol=1e-9)
    logits, labels = torch.tensor(chosen - rejected), torch.ones(20, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none"))


def test_a_margin_asks_the_chosen_score_to_win_by_that_much() -> None:
    """arXiv 2307.09288, equation 2."""
    chosen, rejected, margin = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([1.0])
    assert bradley_terry(chosen, rejected, margin).item() == pytest.approx(-math.log(sigma(0.5)))
    assert bradley_terry(chosen, rejected, torch.tensor([1.5])).item() == pytest.approx(math.log(2))
    scores = [0.3, 2.0, -1.0]
    others, margins = torch.tensor([0.5, -1.0, 0.0]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    for function in (lambda s: bradley_terry(s, others, margins), lambda s: bradley_terry(others, s, margins)):
        np.testing.assert_allclose(gradient(function, scores), finite_differences(function, scores), rtol=1e-5)
