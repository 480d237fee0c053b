"""What curricula remember of prompts, and let through."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from reroll.data.curriculum import Curriculum, Level
from reroll.observe.metrics import Last, Stats
from reroll.types import Prompt
from reroll_zoo.curriculum.config import (
    FilterCurriculumConfig,
    LadderCurriculumConfig,
    RememberingConfig,
    TargetCurriculumConfig,
)


class PassRates(Curriculum):
    """Remembers how often each prompt passes: an exponential mean over its groups."""

    def __init__(self, config: RememberingConfig, levels: Iterable[Level] = ()) -> None:
        self._threshold, self._ema_weight = config.threshold, config.ema_weight
        self._rates: dict[str, float] = {}
        """By prompt id; of prompts that were tried."""

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        rate = pass_rate(rewards, threshold=self._threshold)
        known = self._rates.get(prompt.id, rate)
        self._rates[prompt.id] = known + self._ema_weight * (rate - known)

    def state(self) -> dict[str, Any]:
        return {"rates": dict(self._rates)}

    def restore(self, state: dict[str, Any]) -> None:
        self._rates = dict(state["rates"])

    def stats(self) -> Stats:
        """How many prompts were tried, and their mean pass rate."""
        if not self._rates:
            return Stats()
        mean = math.fsum(self._rates.values()) / len(self._rates)
        return Stats({"data/tried_prompts": Last(float(len(self._rates))), "data/pass_rate": Last(mean)})


class Filter(PassRates):
    """Passes over prompts outside [low, high], and tries each of them again every `retry_epochs` visits."""

    def __init__(self, config: FilterCurriculumConfig, levels: Iterable[Level] = ()) -> None:
        super().__init__(config)
        self._config = config
        self._num_passed_over: dict[str, int] = {}
        """By prompt id: visits since it was last tried."""

    def admits(self, prompt: Prompt, luck: float) -> bool:
        rate = self._rates.get(prompt.id)
        num_visits = self._num_passed_over.pop(prompt.id, 0) + 1
        if rate is None or self._config.low <= rate <= self._config.high or num_visits >= self._config.retry_epochs:
            return True
        self._num_passed_over[prompt.id] = num_visits
        return False

    def state(self) -> dict[str, Any]:
        return {**super().state(), "passed_over": dict(self._num_passed_over)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._num_passed_over = dict(state["passed_over"])

    def stats(self) -> Stats:
        """Also: how many prompts rest at the moment."""
        return super().stats() + Stats({"data/resting_prompts": Last(float(len(self._num_passed_over)))})


class Target(PassRates):
    """Draws a prompt with a chance that falls, as a bell curve, with the distance of its pass rate from the target."""

    def __init__(self, config: TargetCurriculumConfig, levels: Iterable[Level] = ()) -> None:
        super().__init__(config)
        self._config = config

    def admits(self, prompt: Prompt, luck: float) -> bool:
        return luck < self.chance(prompt)

    def chance(self, prompt: Prompt) -> float:
        """How likely the prompt is drawn on a visit; 1 if it was never tried."""
        rate = self._rates.get(prompt.id)
        if rate is None:
            return 1.0
        distance = (rate - self._config.target) / self._config.width
        return max(self._config.floor, math.exp(-0.5 * distance**2))


class Ladder(Curriculum):
    """Opens the levels of each domain one after the other, lowest first."""

    def __init__(self, config: LadderCurriculumConfig, levels: Iterable[Level]) -> None:
        self._config = config
        self._level_of: dict[str, int] = {}
        """By prompt id."""
        numbers: dict[str, set[int]] = {}
        for level in levels:
            numbers.setdefault(level.domain, set()).add(level.number)
            self._level_of |= dict.fromkeys((prompt.id for prompt in level.prompts), level.number)
        self._rungs = {domain: sorted(found) for domain, found in numbers.items()}
        self._num_open = dict.fromkeys(numbers, 1)
        self._recent: dict[str, deque[float]] = {domain: deque(maxlen=config.groups) for domain in numbers}
        """Pass rates of the latest groups of the highest open level."""

    def is_open(self, domain: str, level: int) -> bool:
        return level <= self._highest(domain)

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        domain, recent = prompt.domain, self._recent[prompt.domain]
        if self._level_of[prompt.id] != self._highest(domain):
            return
        recent.append(pass_rate(rewards, threshold=self._config.threshold))
        is_top = self._num_open[domain] == len(self._rungs[domain])
        if len(recent) == recent.maxlen and not is_top and math.fsum(recent) / len(recent) >= self._config.opens_at:
            self._num_open[domain] += 1
            recent.clear()

    def state(self) -> dict[str, Any]:
        return {"num_open": dict(self._num_open), "recent": {domain: list(rates) for domain, rates in self._recent.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_open = dict(state["num_open"])
        self._recent = {domain: deque(rates, maxlen=self._config.groups) for domain, rates in state["recent"].items()}

    def stats(self) -> Stats:
        """The highest open level of each domain."""
        return Stats({f"data/{domain}/level": Last(float(self._highest(domain))) for domain in self._rungs})

    def _highest(self, domain: str) -> int:
        return self._rungs[domain][self._num_open[domain] - 1]


def pass_rate(rewards: Sequence[float], *, threshold: float) -> float:
    """The share of samples that pass."""
    return sum(reward >= threshold for reward in rewards) / len(rewards)
