"""Runs that heal: after a fault of machines a run is started anew, and goes on from its last checkpoint and its journal."""

from __future__ import annotations

import mmap

from reroll.errors import NoRoom, RerollError, WorkerDied

PAUSE_S = 0.5
"""Before the first restart: most faults are over at once."""
PAUSE_GROWTH = 4.0
"""So many times as long before each one that follows it in vain: what holds a GPU or a port has time to let go of it, and a
lost node to be known as lost."""
MAX_PAUSE_S = 60.0
_LIMIT, _NUM, _NUM_IN_VAIN, _FURTHEST = range(4)
"""What each cell holds."""


class Restarts:
    """Counts how often a run was started anew since the user started it.

    Those in vain count against the limit: since the last one the run has not gone further than ever before. So a run on bad
    machines goes on for as long as it gets anywhere, and one that fails at the same step again and again ends.

    The counts lie in memory that is shared with processes forked from this one: they are known when the run's is gone.
    """

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 4 * 8)).cast("q")

    def begin(self, limit: int) -> None:
        """The run has its folder: from now on it may be started anew, this often in vain."""
        self._cells[_LIMIT] = limit

    def reached(self, num_steps: int) -> None:
        """So many steps are finished."""
        if num_steps > self._cells[_FURTHEST]:
            self._cells[_FURTHEST] = num_steps
            self._cells[_NUM_IN_VAIN] = 0

    def again(self) -> bool:
        """Count one more, if there may be one more."""
        if self._cells[_NUM_IN_VAIN] >= self._cells[_LIMIT]:
            return False
        self._cells[_NUM] += 1
        self._cells[_NUM_IN_VAIN] += 1
        return True

    def heal(self, error: RerollError) -> bool:
        """Count one more because of this error, if that is one of machines: what the user's code or config does to a run, it
        would do again. That there is no room is a fault of machines once the run has begun."""
        is_fault = isinstance(error, WorkerDied) or (self.num > 0 and isinstance(error, NoRoom))
        return is_fault and self.again()

    @property
    def num(self) -> int:
        """Restarts so far."""
        return self._cells[_NUM]

    @property
    def is_under_way(self) -> bool:
        """Whether it has got further than ever before since it was last started."""
        return self._cells[_FURTHEST] > 0 and self._cells[_NUM_IN_VAIN] == 0 and self._cells[_LIMIT] > 0

    @property
    def pause_s(self) -> float:
        """How long to wait before the restart that was counted last."""
        return min(MAX_PAUSE_S, PAUSE_S * PAUSE_GROWTH ** max(0, self._cells[_NUM_IN_VAIN] - 1))

    def told(self, what: str) -> str:
        """The sentence for whoever watches: what happened, and that the run goes on."""
        left = self._cells[_LIMIT] - self._cells[_NUM_IN_VAIN]
        return (
            f"{what}: the run goes on by itself in {self.pause_s:g} s, from its last checkpoint and its journal (restart "
            f"{self.num}; {left} more before it gives up, unless it gets further)"
        )
