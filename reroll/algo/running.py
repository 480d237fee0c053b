"""Mean and deviation of all rewards of a run, without keeping the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor


class RunningMoments:
    """Welford's running mean and sum of squared deviations, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Sample standard deviation (divisor n - 1); 0 for fewer than two rewards."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, rewards: Tensor | Sequence[float]) -> None:
        """Count a step's rewards in."""
        values = rewards.tolist() if isinstance(rewards, Tensor) else list(rewards)
        for value in values:
            self.count += 1
            above = value - self.mean
            self.mean += above / self.count
            self._squares += above * (value - self.mean)

    def state(self) -> dict[str, float]:
        """All there is to know, as JSON."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` gave."""
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]
