"""What is measured about rewards between two reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from reroll.errors import RewardError, RewardRaised
from reroll.observe.metrics import Max, Mean, Metric, Stats, Sum


class RewardMeter:
    """Durations as a sample sees them, the wait for a free process included."""

    def __init__(self) -> None:
        self._domains: dict[str, _DomainVerdicts] = {}

    @contextmanager
    def judging(self, domain: str) -> Iterator[None]:
        """Times what runs inside, and counts whether it failed."""
        start_s = time.perf_counter()
        try:
            yield
        except RewardError as error:
            self._of(domain).judged(time.perf_counter() - start_s, error)
            raise
        self._of(domain).judged(time.perf_counter() - start_s)

    def waited(self, domain: str, seconds: float) -> None:
        """A call has waited for a process."""
        self._of(domain).wait_s += Mean(seconds)

    def lost(self, domain: str) -> None:
        """A sample's judge was lost before it could judge: no failure, another one judges it."""
        self._of(domain).num_lost += 1

    def stats(self) -> Stats:
        """What happened since the last call."""
        domains, self._domains = self._domains, {}
        return sum((domain.stats(f"judging/{name}/") for name, domain in sorted(domains.items())), Stats())

    def _of(self, domain: str) -> _DomainVerdicts:
        return self._domains.setdefault(domain, _DomainVerdicts())


class _DomainVerdicts:
    """The sums of one domain."""

    def __init__(self) -> None:
        self.latency_s = self.wait_s = Mean(0.0, 0.0)
        self.longest_s = 0.0
        self.num_scored = self.num_failed = self.num_raised = self.num_lost = 0

    def judged(self, seconds: float, error: RewardError | None = None) -> None:
        self.latency_s += Mean(seconds)
        self.longest_s = max(self.longest_s, seconds)
        self.num_scored += error is None
        self.num_failed += error is not None
        self.num_raised += isinstance(error, RewardRaised)

    def stats(self, prefix: str) -> Stats:
        counts = {"scored": self.num_scored, "failed": self.num_failed, "raised": self.num_raised}
        metrics: dict[str, Metric] = {name: Sum(count) for name, count in counts.items()}
        if self.num_lost:
            metrics["lost"] = Sum(self.num_lost)
        if self.latency_s.weight:
            metrics |= {"latency_s": self.latency_s, "latency_max_s": Max(self.longest_s)}
        if self.wait_s.weight:
            metrics["wait_s"] = self.wait_s
        return Stats(metrics).prefixed(prefix)
