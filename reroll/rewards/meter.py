"""What is measured about rewards between two reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from reroll.errors import RewardError
from reroll.observe.metrics import Max, Mean, Metric, Stats, Sum


class RewardMeter:
    """Durations as a sample sees them, the wait for a free process included."""

    def __init__(self) -> None:
        self._domains: dict[str, _Domain] = {}

    @contextmanager
    def judging(self, domain: str) -> Iterator[None]:
        """Times what runs inside, and counts whether it failed."""
        start_s = time.perf_counter()
        try:
            yield
        except RewardError:
            self._of(domain).judged(time.perf_counter() - start_s, failed=True)
            raise
        self._of(domain).judged(time.perf_counter() - start_s, failed=False)

    def waited(self, domain: str, seconds: float) -> None:
        """A call has waited for a process."""
        self._of(domain).wait_s += Mean(seconds)

    def stats(self) -> Stats:
        """What happened since the last call."""
        domains, self._domains = self._domains, {}
        return sum((domain.stats(f"judging/{name}/") for name, domain in sorted(domains.items())), Stats())

    def _of(self, domain: str) -> _Domain:
        return self._domains.setdefault(domain, _Domain())


class _Domain:
    """The sums of one domain."""

    def __init__(self) -> None:
        self.latency_s = self.wait_s = Mean(0.0, 0.0)
        self.longest_s = 0.0
        self.num_scored = self.num_failed = 0

    def judged(self, seconds: float, *, failed: bool) -> None:
        self.latency_s += Mean(seconds)
        self.longest_s = max(self.longest_s, seconds)
        self.num_failed += failed
        self.num_scored += not failed

    def stats(self, prefix: str) -> Stats:
        metrics: dict[str, Metric] = {"scored": Sum(self.num_scored), "failed": Sum(self.num_failed)}
        if self.latency_s.weight:
            metrics |= {"latency_s": self.latency_s, "latency_max_s": Max(self.longest_s)}
        if self.wait_s.weight:
            metrics["wait_s"] = self.wait_s
        return Stats(metrics).prefixed(prefix)
