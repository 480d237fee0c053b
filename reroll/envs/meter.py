"""What is measured about environments between two reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from reroll.envs.base import InvalidAction
from reroll.errors import EnvError, EnvLost
from reroll.observe.metrics import Last, Max, Mean, Metric, Stats, Sum


class EnvMeter:
    """Durations as an episode sees them, the way to where the environment runs included."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._domains = {domain: _DomainTimes() for domain in domains}
        self._waiting_s = Mean(0.0, 0.0)

    def timing(self, domain: str, method: str) -> _Timing:
        """Times what runs inside, and counts it if it fails."""
        return _Timing(self._domains[domain], is_step=method == "step")

    @contextmanager
    def counting_failures(self, domain: str) -> Iterator[None]:
        """Counts what runs inside if it fails."""
        try:
            yield
        except EnvError as error:
            self._domains[domain].failed(error)
            raise

    def waited(self, seconds: float) -> None:
        """An episode has waited for its turn."""
        self._waiting_s += Mean(seconds)

    def stats(self, *, num_live: int, num_stuck: int) -> Stats:
        """What happened since the last call."""
        metrics: dict[str, Metric] = {"env/live": Last(num_live)}
        if num_stuck:
            metrics["env/stuck_threads"] = Last(num_stuck)
        if self._waiting_s.weight:
            metrics["env/waiting_s"] = self._waiting_s
            self._waiting_s = Mean(0.0, 0.0)
        for name, domain in self._domains.items():
            metrics |= {f"env/{name}/{key}": metric for key, metric in domain.metrics().items()}
            self._domains[name].clear()
        return Stats(metrics)


class _DomainTimes:
    """The sums of one domain."""

    __slots__ = ("num_failures", "num_lost", "num_resets", "num_steps", "reset_s", "step_max_s", "step_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_resets = self.num_steps = self.num_failures = self.num_lost = 0
        self.reset_s = self.step_s = self.step_max_s = 0.0

    def failed(self, error: EnvError) -> None:
        """An episode failed; or its place was lost, which is counted apart."""
        if isinstance(error, EnvLost):
            self.num_lost += 1
        else:
            self.num_failures += 1

    def metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if self.num_resets:
            metrics["reset_s"] = Mean(self.reset_s, self.num_resets)
        if self.num_steps:
            metrics |= {"step_s": Mean(self.step_s, self.num_steps), "step_max_s": Max(self.step_max_s)}
        if self.num_resets or self.num_steps or self.num_failures:
            metrics["failures"] = Sum(self.num_failures)
        if self.num_lost:
            metrics["lost"] = Sum(self.num_lost)
        return metrics


class _Timing:
    """A class, where a generator would cost more than what it measures."""

    __slots__ = ("_domain", "_is_step", "_start_s")

    def __init__(self, domain: _DomainTimes, *, is_step: bool) -> None:
        self._domain, self._is_step = domain, is_step

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, EnvError | InvalidAction):
            return  # A cancelled call says nothing about the environment.
        elapsed_s = time.perf_counter() - self._start_s
        domain = self._domain
        if isinstance(error, EnvError):
            domain.failed(error)
        if self._is_step:
            domain.num_steps += 1
            domain.step_s += elapsed_s
            domain.step_max_s = max(domain.step_max_s, elapsed_s)
        else:
            domain.num_resets += 1
            domain.reset_s += elapsed_s
