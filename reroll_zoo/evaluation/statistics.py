"""Statistics of evaluation: unbiased pass@k and maj@k, and confidence intervals of means over prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: 95 % of it lie within so many standard deviations."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate between 0 and 1 and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without replacement, hold a pass."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be 1 to {num_samples}, got {k}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def maj_at_k(answers: Sequence[str | None], passed: Sequence[bool], *, k: int) -> float:
    """The chance that the answer given most often by k of the n samples, drawn without replacement, passes.

    Answers that tie share the chance. A sample without an answer abstains. Where equal answers were judged differently,
    their answer passes in proportion.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"k must be 1 to {len(answers)}, got {k}")
    votes = Counter(answer for answer in answers if answer is not None)
    num_passed = Counter(answer for answer, passes in zip(answers, passed, strict=True) if passes)
    chance = _election(tuple(sorted(votes.values())), len(answers) - votes.total(), k)
    return sum(chance[votes[answer]] * num_passed[answer] / votes[answer] for answer in votes)


@lru_cache(maxsize=4096)
def _election(votes: tuple[int, ...], num_abstaining: int, k: int) -> Mapping[int, float]:
    """By number of votes: the chance that an answer with so many is elected by k of all the samples."""
    num_subsets = math.comb(sum(votes) + num_abstaining, k)
    chance = {}
    for mine in set(votes):
        others = list(votes)
        others.remove(mine)
        won = 0.0
        for drawn in range(1, min(mine, k) + 1):
            ways = _ways(others, num_abstaining, num_drawn=k - drawn, most=drawn)
            won += math.comb(mine, drawn) * sum(num / (1 + num_ties) for num_ties, num in ways.items()) / num_subsets
        chance[mine] = won
    return chance


def _ways(votes: Sequence[int], num_abstaining: int, *, num_drawn: int, most: int) -> Mapping[int, int]:
    """How many sets of `num_drawn` samples give no answer more than `most` votes; by how many answers get as many."""
    ways: Counter[tuple[int, int]] = Counter()
    """By samples drawn and answers that reach `most`."""
    for num in range(min(num_abstaining, num_drawn) + 1):
        ways[num, 0] = math.comb(num_abstaining, num)
    for available in votes:
        longer: Counter[tuple[int, int]] = Counter()
        for (so_far, num_ties), num_ways in ways.items():
            for num in range(min(available, most, num_drawn - so_far) + 1):
                longer[so_far + num, num_ties + (num == most)] += num_ways * math.comb(available, num)
        ways = longer
    return {num_ties: num_ways for (drawn, num_ties), num_ways in ways.items() if drawn == num_drawn}


def mean_over_prompts(rates: Sequence[float], *, num_draws: int) -> Estimate:
    """The mean of one rate per prompt, each from `num_draws` independent draws, as an estimate for all such prompts.

    The interval is Wilson's, for as many independent draws as would vary like the mean over prompts does: at least one per
    prompt, at most all. With one draw per prompt it is the plain Wilson interval; it never leaves 0 to 1, and is not
    empty when all prompts pass.
    """
    num_prompts = len(rates)
    mean = math.fsum(rates) / num_prompts
    spread = math.fsum((rate - mean) ** 2 for rate in rates)
    variance = spread / (num_prompts - 1) / num_prompts if num_prompts > 1 else 0.0
    least, most = num_prompts, num_prompts * num_draws
    if mean in (0, 1) or num_prompts == 1:
        return wilson(mean, num_draws=least)  # Prompts that all go alike say nothing of how much they differ.
    return wilson(mean, num_draws=min(max(mean * (1 - mean) / variance, least), most) if variance else most)


def wilson(rate: float, *, num_draws: float) -> Estimate:
    """Wilson's score interval of a rate seen in so many independent draws."""
    square = Z_95**2 / num_draws
    centre = (rate + square / 2) / (1 + square)
    reach = math.sqrt(rate * (1 - rate) * square + square**2 / 4) / (1 + square)
    return Estimate(rate, max(0.0, min(rate, centre - reach)), min(1.0, max(rate, centre + reach)))


def average(parts: Sequence[Estimate]) -> Estimate:
    """The plain mean of independent estimates. Their distances to their own bounds add up as squares (the MOVER method)."""
    value = math.fsum(part.value for part in parts) / len(parts)
    below = math.sqrt(math.fsum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(math.fsum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Estimate(value, max(0.0, value - below), min(1.0, value + above))
