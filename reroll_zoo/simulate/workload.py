"""What samples are like: how long, in how many turns, with what latencies. Drawn by seed, so every setting meets the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation

TABLE_SIZE = 1 << 14
_FORMS = "fixed:256, uniform:64,512, lognormal:MEAN,SIGMA, pareto:LEAST,ALPHA or exponential:MEAN"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A distribution as a table of values: a seed always picks the same one."""

    table: NDArray[np.float64]
    salt: int = 0

    def of(self, seed: int) -> float:
        """The value of this seed. Tables of another salt pick independently."""
        mixed = (seed ^ (self.salt * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        return float(self.table[(mixed >> 32) % len(self.table)])

    @property
    def mean(self) -> float:
        return float(self.table.mean())

    @property
    def longest(self) -> float:
        return float(self.table.max())


def fixed(value: float) -> Drawn:
    """Always the same."""
    return Drawn(np.array([value]))


def empirical(values: Sequence[float], *, salt: int) -> Drawn:
    """Values as they were seen."""
    return Drawn(np.asarray(values, dtype=np.float64), salt)


def parse_drawn(
    text: str, *, salt: int, name: str, most: float = math.inf, reaches: float = 0, limit: float = math.inf
) -> Drawn:
    """A distribution as the command line writes it, cut at `most`. Raises ConfigError with the forms there are, also for one
    that never reaches `reaches` or goes beyond `limit`."""
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else [float(kind)]
        values = _draw(kind if rest else "fixed", numbers, np.random.default_rng(salt))
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("it gives values that are negative or not finite")
        if values.max() < reaches or values.max() > limit:
            raise ValueError(f"its largest value is {values.max():g}")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError([Violation(name, f"{text!r} is no distribution: {error}", f"write a number, or {_FORMS}")]) from error
    return Drawn(np.minimum(values, most), salt)


def _draw(kind: str, numbers: Sequence[float], rng: np.random.Generator) -> NDArray[np.float64]:
    draws: dict[str, Callable[..., NDArray[np.float64]]] = {
        "fixed": lambda value: np.full(1, value),
        "uniform": lambda low, high: rng.uniform(low, high, TABLE_SIZE),
        "exponential": lambda mean: rng.exponential(mean, TABLE_SIZE),
        # `mean` is that of the draws, not of their logarithms.
        "lognormal": lambda mean, sigma: rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, TABLE_SIZE),
        "pareto": lambda least, alpha: least * (1 + rng.pareto(alpha, TABLE_SIZE)),
    }
    if kind not in draws:
        raise KeyError(f"there is no {kind}")
    return draws[kind](*numbers)


def env_slots(config: RlvrConfig) -> int | None:
    """Environments that may live at once; None where there are none."""
    return config.env_workers.max_live if config.envs else None


def streams_from(config: RlvrConfig, *, num_ranks: int) -> int | None:
    """Written tokens that fill a micro-batch on every rank, if updates are streamed."""
    strategy = config.policy.strategy
    return max(1, num_ranks // strategy.ranks_per_share) * strategy.pass_tokens if config.train.stream else None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that the samples of a run bring with them. Lengths are in tokens, times in seconds."""

    lengths: Drawn
    """Of one completion."""
    prompt_tokens: float
    max_tokens: int
    turns: Drawn = field(default_factory=lambda: fixed(1))
    """Of one episode."""
    reply_tokens: float = 0.0
    """What an environment answers, a turn."""
    reset_s: Drawn = field(default_factory=lambda: fixed(0))
    env_s: Drawn = field(default_factory=lambda: fixed(0))
    """One step of an environment."""
    score_s: Drawn = field(default_factory=lambda: fixed(0))
    prompt_factors: Drawn = field(default_factory=lambda: fixed(1))
    """How much longer all completions of a prompt are than those of others: siblings are alike."""
    rewards: Drawn = field(default_factory=lambda: Drawn(np.array([0.0, 1.0]), 7))
    failed: float = 0.0
    """Share of the samples that fail when they are scored."""
    env_slots: int | None = None
    """Environments that may live at once; None: as many as there are samples."""

    def context_tokens(self, turn: int) -> float:
        """What stands before the completion of this turn (the first is 0), on average."""
        return self.prompt_tokens + turn * (self.lengths.mean * self.prompt_factors.mean + self.reply_tokens)

    def num_tokens(self, seed: int, prompt: int) -> int:
        """Of the completion that this seed draws for the prompt of this number."""
        return max(1, min(self.max_tokens, round(self.lengths.of(seed) * self.prompt_factors.of(prompt))))
