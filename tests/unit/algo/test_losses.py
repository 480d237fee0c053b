"""Every loss against its paper's formula, written sequence by sequence with loops."""

import inspect
from math import exp, log, prod
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import LOSSES, OPTIONS, Arrays, loss_and_gradient, ragged, sequences, tokens
from pydantic import TypeAdapter, ValidationError

from reroll.algo.losses import clipped_mask, ppo, value_loss
from reroll.config.imports import import_object
from reroll.config.losses import LossConfig


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def ratios(s: Arrays) -> list[float]:
    return [exp(new - old) for new, old in zip(s["logp"], s["old_logp"], strict=True)]


def ppo_term(ratio: float, advantage: float, low: float, high: float) -> float:
    """arXiv 1707.06347, Eq. 7."""
    return min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def reference_ppo(s: Arrays, clip_low: float, clip_high: float, dual_clip: float = np.inf) -> float:
    """With two bounds: arXiv 2503.14476. The dual clip, 1912.09729: max(min(...), c * A) where A < 0."""
    terms = []
    for ratio, advantage in zip(ratios(s), s["advantage"], strict=True):
        term = ppo_term(ratio, advantage, clip_low, clip_high)
        terms.append(max(term, dual_clip * advantage) if advantage < 0 else term)
    return -sum(terms)


def reference_gspo(s: Arrays, clip_low: float, clip_high: float) -> float:
    """arXiv 2507.18071: the sequence's likelihood ratio to the power of 1 / length in PPO's place."""
    ratio = prod(ratios(s)) ** (1 / len(s["logp"]))
    return -sum(ppo_term(ratio, advantage, clip_low, clip_high) for advantage in s["advantage"])


def reference_gmpo(s: Arrays, clip_low: float, clip_high: float) -> float:
    """arXiv 2507.20673: the root of the product of min(r^sgn A, clip(r)^sgn A)^sgn A, times A."""
    factors = []
    for ratio, advantage in zip(ratios(s), s["advantage"], strict=True):
        sign = np.sign(advantage)
        factors.append(min(ratio**sign, clip(ratio, exp(-clip_low), exp(clip_high)) ** sign) ** sign)
    return -sum(s["advantage"]) * prod(factors) ** (1 / len(factors))


def reference_sapo(s: Arrays, tau_positive: float, tau_negative: float) -> float:
    """arXiv 2511.20347: f(r) * A with f(r) = 4 / tau * sigmoid(tau * (r - 1))."""
    total = 0.0
    for ratio, advantage in zip(ratios(s), s["advantage"], strict=True):
        tau = tau_positive if advantage > 0 else tau_negative
        total += 4 / tau / (1 + exp(-tau * (ratio - 1))) * advantage
    return -total


def reference_kimi(s: Arrays, tau: float) -> float:
    """arXiv 2501.12599: (r - mean r - tau * log(policy / old))² of the whole answer, over 2 tau, less its constant."""
    advantage = float(s["advantage"][0])
    return ((advantage - tau * sum(s["logp"] - s["old_logp"])) ** 2 - advantage**2) / (2 * tau)


def reference_dro(s: Arrays, beta: float) -> float:
    return sum(-a * p + beta / 2 * (p - q) ** 2 for a, p, q in zip(s["advantage"], s["logp"], s["old_logp"], strict=True))


def reference_dppo(s: Arrays, *, by: str, **options: float) -> float:
    """arXiv 2602.04879: M * r * A, M = 0 beyond the threshold where (A > 0 and r > 1) or (A < 0 and r < 1); r bounded."""
    return -sum(weight * advantage for weight, advantage in zip(weight_dppo(s, by=by, **options), s["advantage"], strict=True))


def weight_dppo(s: Arrays, *, by: str, max_divergence: float, max_divergence_low: float, max_ratio: float) -> list[float]:
    weights = []
    for ratio, advantage, new, old in zip(ratios(s), s["advantage"], np.exp(s["logp"]), np.exp(s["old_logp"]), strict=True):
        divergence = abs(new - old) if by == "tv" else old * log(old / new) + (1 - old) * log((1 - old) / (1 - new))
        leaving_up = advantage > 0 and ratio > 1 and divergence > max_divergence
        leaving_down = advantage < 0 and ratio < 1 and divergence > max_divergence_low
        weights.append(0.0 if leaving_up or leaving_down else min(ratio, max_ratio))
    return weights


def reference_kl_cov(s: Arrays, coef: float) -> float:
    """arXiv 2505.22617: r * A, less coef * KL for the selected tokens."""
    rows = zip(ratios(s), s["advantage"], s["selected"], strict=True)
    return sum(-ratio * advantage + (coef * abs(log(ratio)) if selected else 0) for ratio, advantage, selected in rows)


def reference_topr(s: Arrays) -> float:
    """arXiv 2503.14286: weight 1 for A > 0, the answer's ratio clipped to [0, 1] otherwise."""
    weight = clip(prod(ratios(s)), 0, 1)
    return -sum((1 if a > 0 else weight) * a * p for a, p in zip(s["advantage"], s["logp"], strict=True))


def reference_cispo(s: Arrays, clip_low: float, clip_high: float) -> float:
    """arXiv 2506.13585: clip(r) * A * log policy, the clipped ratio held fixed."""
    rows = zip(ratios(s), s["advantage"], s["logp"], strict=True)
    return -sum(clip(ratio, 1 - clip_low, 1 + clip_high) * a * p for ratio, a, p in rows)


def without_selected(s: Arrays) -> Arrays:
    return {name: value[~s["selected"]] for name, value in s.items()}


REFERENCES = {
    "reinforce": lambda s: -float(s["advantage"] @ s["logp"]),
    "ppo": reference_ppo,
    "gspo": reference_gspo,
    "gspo_token": reference_gspo,  # The same value: the stop-gradients change only the gradient.
    "gmpo": reference_gmpo,
    "cispo": reference_cispo,
    "topr": reference_topr,
    "sapo": reference_sapo,
    "kimi": reference_kimi,
    "dro": reference_dro,
    "dppo_tv": lambda s, **options: reference_dppo(s, by="tv", **options),
    "dppo_kl": lambda s, **options: reference_dppo(s, by="kl", **options),
    "clip_cov": lambda s, **options: reference_ppo(without_selected(s), **options),
    "kl_cov": reference_kl_cov,
}


def weight_cispo(s: Arrays, clip_low: float, clip_high: float) -> list[float]:
    return [clip(ratio, 1 - clip_low, 1 + clip_high) for ratio in ratios(s)]


def weight_topr(s: Arrays) -> list[float]:
    return [1 if advantage > 0 else min(prod(ratios(s)), 1) for advantage in s["advantage"]]


def weight_gspo_token(s: Arrays, clip_low: float, clip_high: float) -> list[float]:
    """arXiv 2507.18071, the gradient of GSPO-token: s * A * grad log policy, and none where s is clipped."""
    ratio = prod(ratios(s)) ** (1 / len(s["logp"]))
    clipped = [ratio > 1 + clip_high if advantage > 0 else ratio < 1 - clip_low for advantage in s["advantage"]]
    return [0 if stop else ratio for stop in clipped]


WEIGHTS = {
    "cispo": weight_cispo,
    "topr": weight_topr,
    "gspo_token": weight_gspo_token,
    "dppo_tv": lambda s, **options: weight_dppo(s, by="tv", **options),
    "dppo_kl": lambda s, **options: weight_dppo(s, by="kl", **options),
}
"""Losses that hold something fixed: their gradient is -weight * A, which no difference of values shows."""


def numeric_gradient(kind: str, s: Arrays) -> list[float]:
    """Central differences of the reference."""
    gradient = []
    for place in range(len(s["logp"])):
        step = np.zeros(len(s["logp"]))
        step[place] = 1e-6
        high, low = (REFERENCES[kind](s | {"logp": s["logp"] + sign * step}, **OPTIONS[kind]) for sign in (1, -1))
        gradient.append((high - low) / 2e-6)
    return gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_are_those_of_the_papers_formula(kind: str, seed: int) -> None:
    arrays = ragged(seed, one_advantage_a_sequence=kind == "kimi")
    loss, gradient = loss_and_gradient(kind, arrays)
    for index, s in enumerate(sequences(arrays)):
        rows = arrays["sequence"] == index
        if not s["mask"].any():
            assert not loss[rows].any()
            assert not gradient[rows].any()
            continue
        assert loss[rows].sum() == pytest.approx(REFERENCES[kind](s, **OPTIONS[kind]), rel=1e-9, abs=1e-12)
        weigh = WEIGHTS.get(kind)
        expected = -np.array(weigh(s, **OPTIONS[kind])) * s["advantage"] if weigh else numeric_gradient(kind, s)
        np.testing.assert_allclose(gradient[rows & arrays["mask"]], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", LOSSES)
def test_before_the_policy_moves_every_loss_has_the_gradient_of_reinforce(kind: str) -> None:
    arrays = ragged(0, one_advantage_a_sequence=kind in ("gspo", "gmpo"))
    arrays |= {"old_logp": arrays["logp"], "selected": np.zeros_like(arrays["mask"])}
    gradient = loss_and_gradient(kind, arrays)[1]
    np.testing.assert_allclose(gradient, np.where(arrays["mask"], -arrays["advantage"], 0), atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # inside the range: -ratio * A
        (1.5, 2.0, 0.0),  # already far enough up
        (0.5, 2.0, -1.0),  # too low but should rise: still pulled
        (0.5, -2.0, 0.0),  # already far enough down
        (1.5, -2.0, 3.0),  # too high and should fall: still pushed
        (3.5, -2.0, 0.0),  # beyond the dual clip: would be pushed with all its weight
    ],
)
def test_ppo_has_no_gradient_where_the_ratio_went_too_far(ratio: float, advantage: float, expected: float) -> None:
    one = {"old_logp": np.array([-4.0]), "logp": np.array([-4.0 + log(ratio)]), "advantage": np.array([advantage])}
    t, leaf = tokens(one | {"mask": np.array([True]), "sequence": np.array([0])})
    loss = ppo(t, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0].item() == pytest.approx(expected, abs=1e-6)
    assert clipped_mask(loss, t).tolist() == [expected == 0]


def test_gspo_is_ppo_on_sequences_of_one_token() -> None:
    arrays = ragged(1)
    arrays["sequence"] = np.arange(len(arrays["mask"]))
    options = {"clip_low": 0.1, "clip_high": 0.3}
    for kind in ("gspo", "gspo_token"):
        t, leaf = tokens(arrays)
        expected, actual = LOSSES["ppo"](t, **options), LOSSES[kind](t, **options)
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0] for loss in (expected, actual)]
        torch.testing.assert_close(gradients[1], gradients[0])


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage_and_only_there() -> None:
    same, different = ragged(2, one_advantage_a_sequence=True), ragged(2)
    for gspo, gspo_token in zip(loss_and_gradient("gspo", same), loss_and_gradient("gspo_token", same), strict=True):
        np.testing.assert_allclose(gspo_token, gspo, rtol=1e-12, atol=1e-15)
    gradients = [loss_and_gradient(kind, different)[1] for kind in ("gspo", "gspo_token")]
    assert not np.allclose(gradients[0], gradients[1])


def test_unbounded_cispo_and_unbounded_ppo_are_importance_weighted_reinforce() -> None:
    arrays = ragged(3)
    expected = np.where(arrays["mask"], -np.exp(arrays["logp"] - arrays["old_logp"]) * arrays["advantage"], 0)
    for kind in ("cispo", "ppo"):
        t, leaf = tokens(arrays)
        loss = LOSSES[kind](t, clip_low=1.0, clip_high=float("inf"))
        np.testing.assert_allclose(torch.autograd.grad(loss.sum(), leaf)[0].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "gspo_token", "gmpo", "dppo_tv", "dppo_kl", "clip_cov"])
def test_the_inputs_of_these_tests_reach_both_sides_of_every_bound(kind: str) -> None:
    held = []
    for seed in range(3):
        t, _ = tokens(ragged(seed, one_advantage_a_sequence=kind == "gspo"))
        stopped = clipped_mask(LOSSES[kind](t, **OPTIONS[kind]), t)
        assert not stopped[~t.mask].any()
        held.append(t.advantage[stopped])
    signs = torch.cat(held).sign().tolist()
    assert {1.0, -1.0} == set(signs)
    assert len(signs) < 3 * int(t.mask.sum())


def test_a_loss_with_a_selection_says_when_nothing_was_selected() -> None:
    arrays = ragged(0)
    del arrays["selected"]
    selecting = [kind for kind, node in nodes().items() if node.selects]
    assert selecting == ["clip_cov", "kl_cov"]
    for kind in selecting:
        with pytest.raises(ValueError, match="what its node `selects`"):
            LOSSES[kind](tokens(arrays)[0], **OPTIONS[kind])


@pytest.mark.parametrize("seed", range(2))
def test_the_value_loss_is_the_larger_of_the_two_errors(seed: int) -> None:
    value, old_value, returns = np.random.default_rng(seed).normal(size=(3, 100))
    expected = []
    for new, old, goal in zip(value, old_value, returns, strict=True):
        expected.append(max((new - goal) ** 2, (clip(new, old - 0.2, old + 0.2) - goal) ** 2) / 2)
    leaf = torch.tensor(value, requires_grad=True)
    loss = value_loss(leaf, torch.tensor(old_value), torch.tensor(returns), clip=0.2)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)
    gradient = torch.autograd.grad(loss.sum(), leaf)[0].numpy()
    went_towards_the_return = (np.abs(value - old_value) > 0.2) & ((value - old_value) * (returns - old_value) > 0)
    assert not gradient[went_towards_the_return & (np.abs(value - returns) < np.abs(returns - old_value) - 0.2)].any()
    plain = value_loss(leaf, torch.tensor(old_value), torch.tensor(returns), clip=float("inf"))
    np.testing.assert_allclose(plain.detach().numpy(), (value - returns) ** 2 / 2, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_a_rare_token_inside_the_trust_region_weighs_no_more_than_the_largest_ratio(kind: str) -> None:
    one = {"old_logp": np.array([log(1e-6)]), "logp": np.array([log(0.01)]), "advantage": np.array([1.0])}
    t, leaf = tokens(one | {"mask": np.array([True]), "sequence": np.array([0])})
    for options, expected in ({}, 1e4), ({"max_ratio": 20.0}, 20.0):
        loss = LOSSES[kind](t, max_divergence=0.15, **options)
        assert torch.autograd.grad(loss, leaf, retain_graph=True)[0].item() == pytest.approx(-expected)
    assert nodes()[kind](kind=kind).max_ratio == 20.0


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_without_a_bound_on_the_ratio_the_trust_region_is_the_papers(kind: str) -> None:
    """-r * A and nothing else: the value's own slope is the gradient."""
    arrays, threshold = ragged(1), OPTIONS[kind]["max_divergence"]
    t, leaf = tokens(arrays)
    gradient = torch.autograd.grad(LOSSES[kind](t, max_divergence=threshold).sum(), leaf)[0].numpy()
    no_bound = {"max_divergence": threshold, "max_divergence_low": threshold, "max_ratio": np.inf}
    for index, s in enumerate(sequences(arrays)):
        expected = -np.array(weight_dppo(s, by=kind.removeprefix("dppo_"), **no_bound)) * s["advantage"]
        np.testing.assert_allclose(gradient[(arrays["sequence"] == index) & arrays["mask"]], expected, rtol=1e-9)


def nodes() -> dict[str, Any]:
    return dict(LossConfig.kinds())


def test_every_configured_loss_has_a_function_that_takes_its_options() -> None:
    assert nodes().keys() - {"import"} == LOSSES.keys() == OPTIONS.keys()
    for kind, function in LOSSES.items():
        node = nodes()[kind](kind=kind)
        assert list(inspect.signature(function).parameters)[1:] == list(node.arguments)
        selects = inspect.signature(import_object(node.selects)).parameters if node.selects else ()
        assert list(selects)[3:] == list(node.selection)


def test_a_loss_of_ones_own_is_a_path_and_options() -> None:
    loss = TypeAdapter(LossConfig).validate_python({"kind": "import", "path": "my.losses:mine", "options": {"alpha": 1}})
    assert (loss.path, loss.options) == ("my.losses:mine", {"alpha": 1})
    with pytest.raises(ValidationError, match="path"):
        TypeAdapter(LossConfig).validate_python({"kind": "import", "path": "no_function"})


def test_bounds_that_leave_nothing_between_them_are_refused() -> None:
    with pytest.raises(ValidationError, match="swap select_low and select_high"):
        TypeAdapter(LossConfig).validate_python({"kind": "clip_cov", "select_low": 6})
