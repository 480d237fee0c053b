from math import exp, inf, prod
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from reroll.algo.losses import Tokens, ppo
from reroll_zoo.algorithms.correction_config import ImportanceWeightConfig
from reroll_zoo.algorithms.corrections import Bound, Correction, Level, correct

Arrays = dict[str, NDArray[Any]]

SEQUENCE = np.repeat([0, 1, 2, 3], [3, 8, 2, 6])
TURN = np.array([-1, 0, 0, -1, 0, 0, -1, 1, 1, 1, 2, -1, -1, 0, 0, -1, 1, 2, 2])


def sampled(seed: int) -> Arrays:
    """Trainer and sampler log-probs of four sequences of up to three turns; the third has nothing in the loss."""
    trainer, sampler = -np.random.default_rng(seed).exponential(1.0, size=(2, len(TURN)))
    return {"old_logp": trainer, "sampler_logp": sampler, "mask": TURN >= 0, "sequence": SEQUENCE, "turn": TURN}


def corrected(arrays: Arrays, **options: Any) -> Correction:
    return correct(**{name: torch.tensor(value) for name, value in arrays.items()}, **options)


def units(arrays: Arrays, level: str) -> list[list[int]]:
    """The places of the tokens in the loss, unit by unit."""
    found: dict[Any, list[int]] = {}
    for place in np.flatnonzero(arrays["mask"]):
        sequence, turn = arrays["sequence"][place], arrays["turn"][place]
        key = {"token": place, "turn": (sequence, turn), "geometric_turn": (sequence, turn)}.get(level, sequence)
        found.setdefault(key, []).append(int(place))
    return list(found.values())


def bound(weight: float, mode: str, low: float, high: float) -> float:
    if mode == "truncate":
        return min(weight, high)
    inside = low <= weight <= high
    return (weight if mode == "mask" else 1.0) if inside else 0.0


@pytest.mark.parametrize("mode", get_args(Bound))
@pytest.mark.parametrize("level", get_args(Level))
def test_each_unit_gets_its_bounded_ratio(level: Level, mode: Bound) -> None:
    for seed in range(3):
        arrays = sampled(seed)
        expected, raw, bounded = np.zeros(len(TURN)), [], []
        for places in units(arrays, level):
            weight = prod(exp(arrays["old_logp"][place] - arrays["sampler_logp"][place]) for place in places)
            raw.append(weight ** (1 / len(places)) if level.startswith("geometric") else weight)
            bounded.append(bound(raw[-1], mode, 0.6, 1.7))
            expected[places] = bounded[-1]
        result = corrected(arrays, level=level, mode=mode, low=0.6, high=1.7)
        np.testing.assert_allclose(result.weight.numpy(), expected, rtol=1e-12)
        beyond = [weight > 1.7 or (mode != "truncate" and weight < 0.6) for weight in raw]
        assert result.means["weight"] == pytest.approx((sum(raw), len(raw)))
        assert result.means["bounded"] == (sum(beyond), len(raw))
        assert result.weight_max == pytest.approx(max(raw))
        squares = sum(weight**2 for weight in bounded)
        assert result.means["effective"] == pytest.approx((sum(bounded) ** 2 / squares if squares else 0.0, len(raw)))


def test_the_kl_is_the_k3_of_sampler_to_trainer_over_the_tokens_in_the_loss() -> None:
    arrays = sampled(0)
    difference = (arrays["old_logp"] - arrays["sampler_logp"])[arrays["mask"]]
    expected = np.exp(difference) - 1 - difference
    result = corrected(arrays, level="sequence", mode="truncate", low=0.0, high=2.0)
    assert result.means["kl"] == pytest.approx((expected.sum(), len(expected)))


@pytest.mark.parametrize("mode", get_args(Bound))
@pytest.mark.parametrize("level", get_args(Level))
def test_tokens_off_the_mask_change_nothing(level: Level, mode: Bound) -> None:
    arrays, results = sampled(1), []
    for noise in (0.0, np.nan, 1e9, -np.inf):
        spoilt = {name: np.where(arrays["mask"], arrays[name], noise) for name in ("old_logp", "sampler_logp")}
        results.append(corrected(arrays | spoilt, level=level, mode=mode, low=0.6, high=1.7))
    for result in results[1:]:
        assert torch.equal(result.weight, results[0].weight)
        assert (result.means, result.weight_max) == (results[0].means, results[0].weight_max)


@pytest.mark.parametrize("mode", get_args(Bound))
@pytest.mark.parametrize("level", get_args(Level))
def test_nothing_in_the_loss_and_endless_ratios_stay_finite(level: Level, mode: Bound) -> None:
    arrays = sampled(2)
    empty = corrected(arrays | {"mask": np.zeros(len(TURN), dtype=bool)}, level=level, mode=mode, low=0.5, high=2.0)
    assert not empty.weight.any()
    assert empty.weight_max == 0
    assert set(empty.means.values()) == {(0.0, 0.0)}
    for trainer, sampler in ((-0.1, -np.inf), (-np.inf, -0.1), (-1000.0, -0.1)):
        extreme = {"old_logp": np.full(len(TURN), trainer), "sampler_logp": np.full(len(TURN), sampler)}
        result = corrected(arrays | extreme, level=level, mode=mode, low=0.0, high=inf)
        assert result.weight.isfinite().all()
        assert np.isfinite([result.weight_max, *np.ravel(list(result.means.values()))]).all()


def policy_tokens(arrays: Arrays, old: str) -> tuple[Tokens, torch.Tensor]:
    rng = np.random.default_rng(9)
    leaf = torch.tensor(arrays["old_logp"] + rng.normal(0, 0.3, len(TURN)), requires_grad=True)
    per_token = {name: torch.tensor(arrays[name]) for name in ("mask", "sequence")}
    return Tokens(
        logp=leaf, old_logp=torch.tensor(arrays[old]), advantage=torch.tensor(rng.normal(size=len(TURN))), **per_token
    ), leaf


def test_decoupled_ppo_is_ppo_where_trainer_and_sampler_agree() -> None:
    arrays = sampled(3)
    arrays["sampler_logp"] = arrays["old_logp"]
    t, _ = policy_tokens(arrays, "old_logp")
    loss = ppo(t, clip_low=0.2, clip_high=0.2)
    for level in get_args(Level):
        for mode in get_args(Bound):
            weight = corrected(arrays, level=level, mode=mode, low=0.5, high=2.0).weight
            assert torch.equal(weight * loss, torch.where(t.mask, loss, 0.0))


def test_an_unbounded_weight_times_an_unclipped_ratio_is_the_ratio_to_the_sampler() -> None:
    arrays = sampled(4)
    no_clip = {"clip_low": 1.0, "clip_high": inf}
    weight = corrected(arrays, level="token", mode="truncate", low=0.0, high=inf).weight
    (t, leaf), (t_sampler, leaf_sampler) = policy_tokens(arrays, "old_logp"), policy_tokens(arrays, "sampler_logp")
    decoupled, to_sampler = weight * ppo(t, **no_clip), ppo(t_sampler, **no_clip)
    torch.testing.assert_close(decoupled, to_sampler)
    gradients = [torch.autograd.grad(loss.sum(), at)[0] for loss, at in ((decoupled, leaf), (to_sampler, leaf_sampler))]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_no_gradient_flows_through_the_weight() -> None:
    arrays = {name: torch.tensor(value) for name, value in sampled(0).items()}
    arrays["old_logp"].requires_grad_()
    assert not correct(**arrays, level="token", mode="truncate", low=0.0, high=2.0).weight.requires_grad


def test_the_config_offers_the_same_levels_and_modes() -> None:
    fields = ImportanceWeightConfig.model_fields
    assert get_args(fields["level"].annotation) == get_args(Level)
    assert get_args(fields["mode"].annotation) == get_args(Bound)
    corrected(sampled(0), **ImportanceWeightConfig().arguments)


def test_a_band_that_holds_nothing_is_refused_where_the_lower_bound_counts() -> None:
    with pytest.raises(ValidationError, match="swap low and high"):
        ImportanceWeightConfig(mode="mask", low=2.0, high=1.0)
    assert ImportanceWeightConfig(mode="truncate", high=0.1).high == 0.1
