"""Kills at any moment do not change what is trained on: lengths and rewards with and without fifty of them."""

import asyncio
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from token_runs import TokenRun, length_of

from reroll.observe.journal import Journal
from reroll_zoo.audit.audit import audit

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # scripts, no package

from two_sample import _ks_distance, ks_p_value, p_value

NUM_STEPS, CHECKPOINT_EVERY = 180, 2
CONFIG = {"prompts_per_step": 4, "group_size": 4, "max_tries": 9}


@dataclass
class Trained:
    """What a run was trained on, a number for each sample."""

    lengths: list = field(default_factory=list)
    rewards: list = field(default_factory=list)


async def life(folder, saved, trained, *, rng, is_killed, **config):
    """From a checkpoint to the end or a kill, which loses what was not handed to the system; the last checkpoint.

    What is trained after the last checkpoint is trained again by the next life.
    """
    journal = Journal(folder, text_of=lambda ids: "x")
    one = TokenRun(journal, seed=7, **CONFIG, **config)
    if saved is None:
        one.scheduler.take_up(version=0)
    else:
        one.scheduler.restore(json.loads(saved))
    version = json.loads(saved)["version"] if saved else 0
    one.engine.version = version
    lengths, rewards = [], []
    until = version + rng.randrange(CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY + 2) if is_killed else NUM_STEPS
    while version < min(until, NUM_STEPS):
        groups = await one.scheduler.take(CONFIG["prompts_per_step"])
        lengths += [one.num_completion_tokens for group in groups for one in group.trajectories]
        rewards += [one.reward for group in groups for one in group.trajectories]
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        version += 1
        one.release(groups, version=version)
        if version % CHECKPOINT_EVERY == 0:
            saved = json.dumps(one.scheduler.state())
            trained.lengths += lengths
            trained.rewards += rewards
            lengths, rewards = [], []
    for _ in range(rng.randrange(30)):
        await asyncio.sleep(0)
    journal.partial._rows, journal.partial._over = [], []  # Of what was not flushed nothing is left.
    await one.scheduler.close()
    journal.close()
    return saved, one.scheduler.stats()["rollout/continued_tokens"].value


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"max_staleness": 0},
        {"max_staleness": 2},
        {"max_staleness": 2, "take_window": 2},
        {"max_staleness": 2, "drop_zero_variance_groups": True},
        {"max_staleness": 3, "take_window": 3, "drop_zero_variance_groups": True},
        {"max_staleness": 0, "oversample": 1.5},
        {"max_staleness": 2, "oversample": 1.5},
    ],
    ids=["synchronous", "stale", "window", "filter", "window-and-filter", "over-sampling", "stale-over-sampling"],
)
async def test_with_fifty_kills_lengths_and_rewards_of_what_is_trained_are_those_without(tmp_path, config):
    rng = random.Random(0)
    undisturbed, disturbed = Trained(), Trained()
    await life(tmp_path / "whole", None, undisturbed, rng=rng, is_killed=False, **config)
    saved, num_lives, num_continued = None, 0, 0
    while len(disturbed.lengths) < len(undisturbed.lengths):
        saved, num = await life(tmp_path / "killed", saved, disturbed, rng=rng, is_killed=True, **config)
        num_lives, num_continued = num_lives + 1, num_continued + num
    found = audit(tmp_path / "killed", max_staleness=config["max_staleness"])
    assert found.violations == []
    assert (found.num_lives, found.num_steps) == (num_lives, NUM_STEPS)
    assert num_lives > 50
    assert num_continued > 0
    draws = np.random.default_rng(0)
    for test in (p_value, ks_p_value):
        assert test(disturbed.lengths, undisturbed.lengths, rng=draws) > 0.01
        assert test(disturbed.rewards, undisturbed.rewards, rng=draws) > 0.01


def test_the_test_finds_out_when_a_fifth_of_the_long_samples_is_missing():
    rng = np.random.default_rng(0)
    lengths = [length_of(int(seed)) for seed in rng.integers(0, 2**62, 4000)]
    assert p_value(lengths[:2000], lengths[2000:], rng=rng, num_draws=1000) > 0.01
    shorter = [length for length in lengths[2000:] if length < 30 or rng.random() < 0.8]
    assert p_value(shorter, lengths[:2000], rng=rng, num_draws=1000) < 0.01


def test_a_tail_that_is_cut_while_the_rest_makes_up_for_it_is_found_by_the_shape_alone():
    rng = np.random.default_rng(0)
    lengths = [length_of(int(seed)) for seed in rng.integers(0, 2**62, 2000)]
    cut = [min(length, 40) for length in lengths]
    same_mean = [length + (sum(lengths) - sum(cut)) / len(cut) for length in cut]
    assert p_value(lengths, same_mean, rng=rng, num_draws=500) > 0.01
    assert ks_p_value(lengths, same_mean, rng=rng, num_draws=500) < 0.01


def test_equal_samples_differ_as_often_as_they_should():
    """Under one distribution p-values are spread evenly: a third of them is below a third."""
    rng = np.random.default_rng(0)
    p_values = [ks_p_value(rng.integers(0, 9, 60), rng.integers(0, 9, 80), rng=rng, num_draws=99) for _ in range(200)]
    assert 0.2 < np.mean(np.array(p_values) < 1 / 3) < 0.45
    assert np.mean(np.array(p_values) <= 0.05) < 0.12


def test_the_statistic_is_that_of_kolmogorov_and_smirnov():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=50), rng.normal(0.4, size=70)
    values, counts = np.unique(np.concatenate((first, second)), return_counts=True)
    ours = _ks_distance(np.isin(values, first).astype(int), counts)
    assert ours == pytest.approx(max(abs(np.mean(first <= value) - np.mean(second <= value)) for value in values))
