"""Metrics of the rollout: how samples ended and where their time went."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

from reroll.observe.journal import SampleState
from reroll.observe.metrics import Max, Mean, Metric, Stats, Sum
from reroll.types import Trajectory

ENDS = (SampleState.TRAINED, SampleState.FILTERED, SampleState.ABORTED, SampleState.FAILED)


class MeanMax:
    """Mean and maximum of a stream of numbers."""

    __slots__ = ("count", "highest", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.highest = 0.0

    def add(self, value: float) -> None:
        """Count one more."""
        self.total += value
        self.count += 1
        if value > self.highest:
            self.highest = value

    def metrics(self, name: str) -> dict[str, Metric]:
        """`name` and `name_max`; empty without values."""
        return {name: Mean(self.total, self.count), f"{name}_max": Max(self.highest)} if self.count else {}


class EndingOrder:
    """Whether samples that end early differ from those that end late.

    With `extra_samples`, a group consists of the samples that ended first. The rewards of the aborted ones are unknown; but if
    the earlier half is shorter or better than the later half, the aborted ones would have been longer or worse still, and the
    policy is biased towards the early ones.
    """

    def __init__(self) -> None:
        self._halves = {half: (MeanMax(), MeanMax()) for half in ("early", "late")}

    def add(self, ended: Sequence[Trajectory]) -> None:
        """The usable samples of one group, in the order in which they ended."""
        middle = len(ended) // 2
        for half, samples in (("early", ended[:middle]), ("late", ended[len(ended) - middle :])):
            tokens, rewards = self._halves[half]
            for sample in samples:
                tokens.add(sample.num_completion_tokens)
                rewards.add(sample.reward)

    def metrics(self) -> dict[str, Metric]:
        """`rollout/early_tokens`, `early_reward`, `late_tokens`, `late_reward`; empty without samples."""
        metrics: dict[str, Metric] = {}
        for half, pairs in self._halves.items():
            for name, numbers in zip(("tokens", "reward"), pairs, strict=True):
                if numbers.count:
                    metrics[f"rollout/{half}_{name}"] = Mean(numbers.total, numbers.count)
        return metrics


class RolloutMeter:
    """Counts since its construction: to report, call `stats()` and make a new one. Several domains are counted apart."""

    def __init__(self, domains: Collection[str] = ()) -> None:
        self._domains = domains if len(domains) > 1 else ()
        self.queue_s = MeanMax()
        """Per sample: from admission until its coroutine starts."""
        self.generate_s = MeanMax()
        """Per sample: the episode, including engine queue and environment."""
        self.score_s = MeanMax()
        """Per sample: the reward."""
        self.ready_s = MeanMax()
        """Per group: from its end until it is taken."""
        self.staleness = MeanMax()
        """Per group taken: weight versions between admission and training."""
        self.ends: Counter[SampleState] = Counter()
        """Samples by how they ended."""
        self.order = EndingOrder()
        self.num_replays = 0
        """Episodes played again because their environment was lost; they are not failures."""
        self.num_recalled = 0
        """Samples that had ended before an interruption, or before their group was sent back, and were reused."""
        self.num_continued_tokens = 0
        """Tokens of samples that had not ended by then, which were continued."""
        self.num_discarded_tokens = 0
        """Tokens that were drawn anew, because their weight versions are too old or were lost."""
        self.trained_groups: Counter[str] = Counter()
        """By domain, as are the next two."""
        self.dropped_groups: Counter[str] = Counter()
        self.ceded_groups: Counter[str] = Counter()
        """Slots of a domain that were given to other domains."""

    def stats(self) -> Stats:
        """Times in seconds, counts in samples or, where the name says so, in groups."""
        metrics: dict[str, Metric] = {}
        for name, numbers in (
            ("time/queue_s", self.queue_s),
            ("time/generate_s", self.generate_s),
            ("time/score_s", self.score_s),
            ("time/ready_s", self.ready_s),
            ("rollout/staleness", self.staleness),
        ):
            metrics |= numbers.metrics(name)
        for state in ENDS:
            metrics[f"rollout/{state}_samples"] = Sum(self.ends[state])
        metrics |= self.order.metrics()
        metrics["rollout/replayed_samples"] = Sum(self.num_replays)
        metrics["rollout/recalled_samples"] = Sum(self.num_recalled)
        metrics["rollout/continued_tokens"] = Sum(self.num_continued_tokens)
        metrics["rollout/discarded_tokens"] = Sum(self.num_discarded_tokens)
        if num_ended := self.ends.total():
            metrics["rollout/failed_fraction"] = Mean(self.ends[SampleState.FAILED], num_ended)
        for domain in self._domains:
            metrics[f"rollout/{domain}/trained_groups"] = Sum(self.trained_groups[domain])
            metrics[f"rollout/{domain}/dropped_groups"] = Sum(self.dropped_groups[domain])
            metrics[f"rollout/{domain}/ceded_groups"] = Sum(self.ceded_groups[domain])
        return Stats(metrics)


class RecentFailures:
    """The most recent samples that ended by themselves: how many failed, and why."""

    def __init__(self, num_samples: int) -> None:
        self._reasons: deque[str | None] = deque(maxlen=num_samples)
        """None for a sample that ended well."""
        self.num_failed = 0

    def add(self, reason: str | None) -> None:
        """Count a sample; `reason` is None unless it failed."""
        if len(self._reasons) == self._reasons.maxlen and self._reasons[0] is not None:
            self.num_failed -= 1
        self._reasons.append(reason)
        self.num_failed += reason is not None

    def exceed(self, fraction: float) -> bool:
        """Whether more than this fraction failed. False while there are too few samples."""
        return len(self._reasons) == self._reasons.maxlen and self.num_failed > fraction * len(self._reasons)

    def describe(self) -> str:
        """The number of failures and the most common reasons, in words."""
        reasons = Counter(reason for reason in self._reasons if reason is not None)
        lines = [f"  {count} x {reason}" for reason, count in reasons.most_common(5)]
        return "\n".join([f"{self.num_failed} of the last {len(self._reasons)} samples failed:", *lines])
