"""The estimators against their definitions: every subset is drawn, and intervals hold what they promise."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll_zoo.evaluation.statistics import Estimate, average, maj_at_k, mean_over_prompts, pass_at_k, wilson


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), list(itertools.product([6], range(7), range(1, 7))))
def test_pass_at_k_counts_the_subsets_that_hold_a_pass(num_samples: int, num_passed: int, k: int) -> None:
    outcomes = [True] * num_passed + [False] * (num_samples - num_passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(num_samples=num_samples, num_passed=num_passed, k=k) == pytest.approx(
        sum(any(subset) for subset in subsets) / len(subsets)
    )


def test_k_samples_are_needed_for_k() -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        pass_at_k(num_samples=3, num_passed=1, k=4)
    with pytest.raises(ValueError, match="1 to 2"):
        maj_at_k(["a", "b"], [True, False], k=3)


def elected_by_counting(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """The definition: a vote in every subset, ties shared, an answer's verdict averaged over all who gave it."""
    verdict = {
        answer: sum(p for a, p in zip(answers, passed, strict=True) if a == answer) / answers.count(answer)
        for answer in set(answers)
        if answer is not None
    }
    won, subsets = 0.0, list(itertools.combinations(answers, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer, num in votes.items() if num == max(votes.values())]
        won += sum(verdict[answer] for answer in winners) / len(winners) if winners else 0.0
    return won / len(subsets)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=9), st.data())
def test_maj_at_k_is_a_vote_in_every_subset(samples: list[tuple[str | None, bool]], data: st.DataObject) -> None:
    answers, passed = [answer for answer, _ in samples], [passes for _, passes in samples]
    passed = [passes and answer is not None for answer, passes in zip(answers, passed, strict=True)]
    k = data.draw(st.integers(1, len(samples)))
    assert maj_at_k(answers, passed, k=k) == pytest.approx(elected_by_counting(answers, passed, k))


def test_a_majority_of_one_is_a_plain_mean_and_a_majority_of_all_is_one_vote() -> None:
    answers = ["7", "7", "7", "8", "9"]
    passed = [False, False, False, True, False]
    assert maj_at_k(answers, passed, k=1) == pytest.approx(0.2)
    assert maj_at_k(answers, passed, k=5) == 0.0


def test_a_vote_of_many_samples_is_counted_fast() -> None:
    answers = [str(index % 23) for index in range(64)]
    passed = [answer == "3" for answer in answers]
    rate = maj_at_k(answers, passed, k=32)
    rng, won = random.Random(0), 0.0
    for _ in range(4000):
        votes = Counter(rng.sample(answers, 32))
        winners = [answer for answer, num in votes.items() if num == max(votes.values())]
        won += ("3" in winners) / len(winners)
    assert rate == pytest.approx(won / 4000, abs=0.02)


def test_with_one_sample_per_prompt_the_interval_is_wilsons() -> None:
    # Newcombe (1998), table I: 81 of 263 and 0 of 20.
    found = mean_over_prompts([1.0] * 81 + [0.0] * 182, num_draws=1)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    found = mean_over_prompts([0.0] * 20, num_draws=1)
    assert (found.low, found.high) == pytest.approx((0.0, 0.1611), abs=1e-4)


@pytest.mark.parametrize(("num_prompts", "num_samples"), [(25, 1), (25, 8), (100, 4)])
@pytest.mark.parametrize("spread", [(0.3, 0.3), (2.0, 2.0), (0.5, 3.0)])
def test_the_interval_of_a_mean_over_prompts_holds_the_truth_in_95_of_100_cases(
    num_prompts: int, num_samples: int, spread: tuple[float, float]
) -> None:
    """Prompts of very different difficulty (Beta), several samples each: samples of one prompt are not independent."""
    rng, truth = random.Random(0), spread[0] / sum(spread)
    num_held, num_trials = 0, 400
    for _ in range(num_trials):
        difficulties = [rng.betavariate(*spread) for _ in range(num_prompts)]
        rates = [sum(rng.random() < rate for _ in range(num_samples)) / num_samples for rate in difficulties]
        found = mean_over_prompts(rates, num_draws=num_samples)
        num_held += found.low <= truth <= found.high
    assert 0.92 <= num_held / num_trials <= 0.985


def test_the_interval_of_an_average_over_domains_holds_the_truth_in_95_of_100_cases() -> None:
    rng, truths = random.Random(1), [0.9, 0.5, 0.02]
    num_held, num_trials = 0, 600
    for _ in range(num_trials):
        parts = [mean_over_prompts([float(rng.random() < truth) for _ in range(40)], num_draws=1) for truth in truths]
        found = average(parts)
        num_held += found.low <= sum(truths) / 3 <= found.high
    assert 0.93 <= num_held / num_trials <= 0.98


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30), st.integers(1, 8))
def test_an_interval_holds_its_estimate_and_stays_between_0_and_1(rates: list[float], num_draws: int) -> None:
    found = mean_over_prompts(rates, num_draws=num_draws)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.high > found.low, "finitely many prompts prove nothing for certain"


def test_more_prompts_and_more_samples_narrow_the_interval() -> None:
    def width(found: Estimate) -> float:
        return found.high - found.low

    assert width(mean_over_prompts([0.0, 1.0] * 40, num_draws=1)) < width(mean_over_prompts([0.0, 1.0] * 10, num_draws=1))
    assert width(mean_over_prompts([0.4, 0.6] * 10, num_draws=8)) < width(mean_over_prompts([0.0, 1.0] * 10, num_draws=1))
    assert width(wilson(0.5, num_draws=400)) == pytest.approx(2 * 0.0487, abs=1e-3)
