"""What controllers use over time, for `chaos.py`: memory and open handles, and whether they grow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 1.0
WARM_UP_STEPS = 5
"""Of each controller, which do not count: caches fill up."""

Use = tuple[float, int, float, int]
"""Seconds since the first look, finished steps, memory in MB, open handles."""


class UseLog:
    """While this is open, a thread looks every second at what the controller uses."""

    def __init__(self, controllers: Callable[[], Sequence[int]], step: Callable[[], int]) -> None:
        """`controllers`: the processes that are one, if any."""
        self._controllers, self._step = controllers, step
        self._since_s: dict[int, float] = {}
        self._by_pid: dict[int, list[Use]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def lives(self) -> list[list[Use]]:
        """Of each controller, in the order of their lives."""
        return list(self._by_pid.values())

    def __enter__(self) -> UseLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for pid in self._controllers():
                with suppress(OSError, StopIteration):
                    now_s = time.monotonic()
                    seconds = now_s - self._since_s.setdefault(pid, now_s)
                    use = round(seconds, 1), self._step(), _memory_mb(pid), len(os.listdir(f"/proc/{pid}/fd"))
                    self._by_pid.setdefault(pid, []).append(use)


def slopes(lives: Sequence[Sequence[Use]]) -> dict[str, Any]:
    """How memory and handles grow with finished steps, by least squares over all lives, each with a level of its own."""
    warm = [[use for use in life if use[1] >= life[0][1] + WARM_UP_STEPS] for life in map(list, lives) if life]
    warm = [life for life in warm if len(life) > 1]
    return {
        "lives": len(lives),
        "looks": sum(map(len, warm)),
        "memory_mb_per_100_steps": _slope([[(use[1], use[2]) for use in life] for life in warm]),
        "handles_per_100_steps": _slope([[(use[1], use[3]) for use in life] for life in warm]),
    }


def _slope(lives: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Per hundred of the first; None if nothing tells."""
    above, below = 0.0, 0.0
    for life in lives:
        mean_x, mean_y = (sum(point[axis] for point in life) / len(life) for axis in (0, 1))
        above += sum((x - mean_x) * (y - mean_y) for x, y in life)
        below += sum((x - mean_x) ** 2 for x, _ in life)
    return round(100 * above / below, 3) if below else None


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1e3
