"""What lies off the mask, and inputs at the edge: every loss under every aggregation."""

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from loss_cases import LENGTHS, LOSSES, OPTIONS, Arrays, ragged, tokens

from reroll.algo.losses import LOG_RATIO_BOUND, Mode, aggregate, clipped_mask

MODES = get_args(Mode)


def reduced(kind: str, arrays: Arrays, mode: Mode) -> tuple[float, Any]:
    """The scalar that is trained on, and its gradient. [T]"""
    t, leaf = tokens(arrays)
    loss = aggregate(
        LOSSES[kind](t, **OPTIONS[kind]),
        t.mask,
        t.sequence,
        mode=mode,
        num_loss_tokens=int(t.mask.sum()),
        num_sequences=len(set(t.sequence[t.mask].tolist())),
        length=20,
    )
    return loss.item(), torch.autograd.grad(loss, leaf)[0].numpy()


@pytest.mark.parametrize("kind", LOSSES)
def test_tokens_off_the_mask_might_as_well_not_be_there(kind: str) -> None:
    arrays = ragged(4)
    mask = arrays["mask"]
    assert not mask.all()
    for mode in MODES:
        value, gradient = reduced(kind, arrays, mode)
        assert not gradient[~mask].any(), mode
        without, gradient_without = reduced(kind, {name: array[mask] for name, array in arrays.items()}, mode)
        assert without == pytest.approx(value, rel=1e-12), mode
        np.testing.assert_allclose(gradient_without, gradient[mask], rtol=1e-12, err_msg=mode)
        for noise in (np.nan, 1e9, -np.inf):
            spoilt = {name: np.where(mask, arrays[name], noise) for name in ("logp", "old_logp", "advantage")}
            value_spoilt, gradient_spoilt = reduced(kind, arrays | spoilt | {"selected": arrays["selected"] | ~mask}, mode)
            assert value_spoilt == value, (mode, noise)
            np.testing.assert_array_equal(gradient_spoilt, gradient, err_msg=f"{mode}, {noise}")


def test_a_loss_sees_zeros_off_the_mask() -> None:
    arrays = ragged(4)
    arrays |= {"sampler_logp": arrays["old_logp"], "entropy": -arrays["logp"]}
    numbers = ("logp", "old_logp", "advantage", "sampler_logp", "entropy")
    t, _ = tokens(arrays | {name: np.where(arrays["mask"], arrays[name], np.nan) for name in numbers})
    assert t.sampler_logp is not None
    assert t.entropy is not None
    for values in (t.logp, t.old_logp, t.advantage, t.log_ratio, t.sampler_logp, t.entropy):
        assert not values[~t.mask].any()
        assert values[t.mask].all()


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_of_whole_sequences_add_up(kind: str) -> None:
    for mode in MODES:
        assert_micro_batches_add_up(kind, mode)


def assert_micro_batches_add_up(kind: str, mode: Mode) -> None:
    arrays = ragged(5)
    value, gradient = reduced(kind, arrays, mode)
    num_tokens, num_sequences = int(arrays["mask"].sum()), len(set(arrays["sequence"][arrays["mask"]]))
    total, parts = 0.0, []
    for index in range(len(LENGTHS)):
        rows = arrays["sequence"] == index
        part = {name: array[rows] for name, array in arrays.items()} | {"sequence": np.zeros(rows.sum(), dtype=int)}
        t, leaf = tokens(part)
        per_token = LOSSES[kind](t, **OPTIONS[kind])
        counts = {"num_loss_tokens": num_tokens, "num_sequences": num_sequences}
        loss = aggregate(per_token, t.mask, t.sequence, mode=mode, length=20, **counts)
        total += loss.item()
        parts.append(torch.autograd.grad(loss, leaf)[0].numpy())
    assert total == pytest.approx(value, rel=1e-12), mode
    np.testing.assert_allclose(np.concatenate(parts), gradient, rtol=1e-12, err_msg=mode)


@pytest.mark.parametrize("kind", LOSSES)
def test_with_nothing_in_the_loss_value_and_gradient_are_zero(kind: str) -> None:
    arrays = ragged(0)
    for mode in MODES:
        value, gradient = reduced(kind, arrays | {"mask": np.zeros_like(arrays["mask"])}, mode)
        assert value == 0, mode
        assert not gradient.any(), mode


EXTREMES = [(-0.1, -300.0), (-300.0, -0.1), (0.0, -np.inf), (-1e-9, 0.0), (0.0, 0.0)]
"""Pairs of logp and old_logp."""


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_ratios_give_finite_values_and_gradients(kind: str) -> None:
    """A long sequence of them, one alone, and one among ordinary neighbours."""
    common = {
        "mask": np.ones(54, dtype=bool),
        "sequence": np.array([0] * 50 + [1] + [2] * 3),
        "selected": np.arange(54) % 2 == 0,
    }
    for (logp, old_logp), advantage, dtype in product(EXTREMES, (1.5, -1.5, 0.0), (np.float32, np.float64)):
        numbers = {"logp": logp, "old_logp": old_logp, "advantage": advantage}
        arrays = {name: np.full(54, value, dtype=dtype) for name, value in numbers.items()}
        arrays["logp"][-2:], arrays["old_logp"][-2:] = -1.0, -1.1
        value, gradient = reduced(kind, arrays | common, "token_mean")
        assert np.isfinite(value), (numbers, dtype)
        assert np.isfinite(gradient).all(), (numbers, dtype)


def test_a_ratio_beyond_the_bound_has_no_gradient_and_counts_as_held_back() -> None:
    one = {"logp": np.array([-1.0]), "old_logp": np.array([-1.0 - LOG_RATIO_BOUND - 1]), "advantage": np.array([-2.0])}
    t, _ = tokens(one | {"mask": np.array([True]), "sequence": np.array([0])})
    loss = LOSSES["ppo"](t, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(2 * np.exp(LOG_RATIO_BOUND))
    assert clipped_mask(loss, t).tolist() == [True]


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("logp", "expected"), [(-0.001, False), (-0.5, True)])
def test_a_token_that_was_certain_may_move_inside_the_trust_region(kind: str, logp: float, expected: bool) -> None:
    one = {"logp": np.array([logp]), "old_logp": np.array([0.0]), "advantage": np.array([-1.0])}
    t, _ = tokens(one | {"mask": np.array([True]), "sequence": np.array([0])})
    assert clipped_mask(LOSSES[kind](t, max_divergence=0.05), t).tolist() == [expected]


def test_a_token_without_an_advantage_is_not_held_back() -> None:
    arrays = ragged(0)
    t, _ = tokens(arrays | {"advantage": np.zeros(len(arrays["mask"]))})
    assert not clipped_mask(LOSSES["ppo"](t, clip_low=0.0, clip_high=0.0), t).any()
