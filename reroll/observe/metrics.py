"""Metrics that know how they merge, so a mean over ranks and micro-batches is the mean over everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as its two sums."""

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest seen."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """A reading: the newest wins."""

    value: float

    def __add__(self, other: Last) -> Last:
        return other


Metric = Mean | Sum | Max | Last


class Stats(Mapping[str, Metric]):
    """Named metrics. `a + b` merges name by name into a new one, `a += b` into `a`; a name must keep its kind."""

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        self._metrics = dict(metrics or {})

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __add__(self, other: Stats) -> Stats:
        merged = Stats(self._metrics)
        merged += other
        return merged

    def __iadd__(self, other: Stats) -> Self:
        for name, metric in other._metrics.items():
            self.add(name, metric)
        return self

    def add(self, name: str, metric: Metric) -> None:
        """Merge one metric into these."""
        mine = self._metrics.get(name)
        if mine is None:
            self._metrics[name] = metric
        elif type(mine) is not type(metric):
            raise TypeError(f"metric {name} is {type(mine).__name__} here and {type(metric).__name__} there")
        else:
            self._metrics[name] = mine + metric  # type: ignore[operator]

    def prefixed(self, prefix: str) -> Stats:
        """The same metrics under longer names."""
        return Stats({prefix + name: metric for name, metric in self._metrics.items()})

    def values_by_name(self) -> dict[str, float]:
        """Plain numbers, for a tracker."""
        return {name: metric.value for name, metric in self._metrics.items()}

    def __repr__(self) -> str:
        return f"Stats({self._metrics!r})"
