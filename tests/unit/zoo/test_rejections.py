"""Which samples are too far from the policy to learn from, against loops over units."""

from math import exp
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reroll.algo.segments import Level
from reroll_zoo.algorithms.correction_config import DistanceRejectionConfig
from reroll_zoo.algorithms.corrections import Distance, Rejection, Take, reject

Arrays = dict[str, NDArray[Any]]

SEQUENCE = np.repeat([0, 1, 2, 3], [3, 8, 2, 6])
TURN = np.array([-1, 0, 0, -1, 0, 0, -1, 1, 1, 1, 2, -1, -1, 0, 0, -1, 1, 2, 2])


def sampled(seed: int) -> Arrays:
    """Log-probs of policy and sampler, and advantages, of four sequences of up to three turns; the third has no token."""
    rng = np.random.default_rng(seed)
    policy, sampler = -rng.exponential(1.0, size=(2, len(TURN)))
    advantage = rng.normal(size=len(TURN))
    common = {"mask": TURN >= 0, "sequence": SEQUENCE, "turn": TURN}
    return {"logp": policy, "sampler_logp": sampler, "advantage": advantage} | common


def rejected(arrays: Arrays, **options: Any) -> Rejection:
    return reject(**{name: torch.tensor(value) for name, value in arrays.items()}, **options)


def distances(arrays: Arrays, distance: str, level: str, take: str) -> dict[Any, tuple[list[int], float]]:
    """By unit: the places of its tokens in the loss, and how far apart the two policies are there.

    verl's rollout_rs: with r = policy / sampler, -log r, (log r)² / 2 and r - 1 - log r; token, or over a sequence its sum,
    its mean or its largest.
    """
    units: dict[Any, list[int]] = {}
    for place in np.flatnonzero(arrays["mask"]):
        sequence, turn = arrays["sequence"][place], arrays["turn"][place]
        units.setdefault({"token": place, "turn": (sequence, turn), "sequence": sequence}[level], []).append(int(place))
    found = {}
    for unit, places in units.items():
        logs = [arrays["logp"][place] - arrays["sampler_logp"][place] for place in places]
        by_kind = {
            "k1": [-log for log in logs],
            "k2": [log**2 / 2 for log in logs],
            "k3": [exp(log) - 1 - log for log in logs],
        }
        values = by_kind[distance]
        found[unit] = places, {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[take]
    return found


@pytest.mark.parametrize("take", get_args(Take))
@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("distance", get_args(Distance))
def test_units_beyond_the_distance_are_out_as_a_whole(distance: Distance, level: Level, take: Take) -> None:
    seen = set()
    for seed in range(4):
        arrays = sampled(seed)
        units = distances(arrays, distance, level, take)
        high = float(np.median([value for _, value in units.values()])) + 1e-9
        if high <= 0:
            continue
        expected = np.zeros(len(TURN))
        for places, value in units.values():
            expected[places] = value <= high
        result = rejected(arrays, distance=distance, level=level, take=take, high=high, only_negative=False)
        np.testing.assert_array_equal(result.weight.numpy(), expected)
        values = [value for _, value in units.values()]
        assert result.means["distance"] == pytest.approx((sum(values), len(values)))
        num = int(arrays["mask"].sum())
        assert result.means["rejected"] == (num - expected.sum(), num)
        seen |= set(expected[arrays["mask"]])
    assert seen == {0.0, 1.0}


def test_the_mask_of_deepseek_leaves_out_what_is_bad_and_has_become_unlikely() -> None:
    """arXiv 2512.02556: 0 where A < 0 and the sequence's mean log(sampler / policy) is above delta; 1 otherwise."""
    outcomes = set()
    for seed in range(6):
        arrays = sampled(seed)
        expected = np.zeros(len(TURN))
        for sequence in range(4):
            places = np.flatnonzero(arrays["mask"] & (sequence == SEQUENCE))
            mean = np.mean((arrays["sampler_logp"] - arrays["logp"])[places]) if len(places) else 0
            for place in places:
                is_out = arrays["advantage"][place] < 0 and mean > 0.3
                expected[place] = 0 if is_out else 1
                outcomes.add((bool(arrays["advantage"][place] < 0), bool(mean > 0.3)))
        node = DistanceRejectionConfig(distance="k1", high=0.3, only_negative=True)
        np.testing.assert_array_equal(rejected(arrays, **node.arguments).weight.numpy(), expected)
    assert len(outcomes) == 4


@pytest.mark.parametrize("take", get_args(Take))
@pytest.mark.parametrize("level", get_args(Level))
def test_what_lies_off_the_mask_changes_nothing_and_an_empty_one_rejects_nothing(level: Level, take: Take) -> None:
    arrays, options = sampled(1), {"distance": "k3", "level": level, "take": take, "high": 0.5, "only_negative": True}
    plain = rejected(arrays, **options)
    for noise in (np.nan, 1e9, -np.inf):
        names = ("logp", "sampler_logp", "advantage")
        spoilt = {name: np.where(arrays["mask"], arrays[name], noise) for name in names}
        result = rejected(arrays | spoilt, **options)
        assert torch.equal(result.weight, plain.weight)
        assert result.means == plain.means
    empty = rejected(arrays | {"mask": np.zeros(len(TURN), dtype=bool)}, **options)
    assert not empty.weight.any()
    assert set(empty.means.values()) == {(0.0, 0.0)}


def test_the_config_offers_the_same_choices() -> None:
    fields = DistanceRejectionConfig.model_fields
    for name, choices in {"distance": Distance, "level": Level, "take": Take}.items():
        assert get_args(fields[name].annotation) == get_args(choices)
