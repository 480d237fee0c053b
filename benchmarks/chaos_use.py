"""What controllers use over time, for `chaos.py`: memory and open handles, at fixed times of their lives."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 1.0
AT_S = (10, 30, 60, 120, 300, 600, 900, 1200, 1800, 2700, 3600)
"""Since the first look. In the first minute caches fill up."""

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


def use_over_time(lives: Sequence[Sequence[Use]]) -> dict[str, Any]:
    """Memory and open handles at fixed times of a controller's life: of those that lived so long, the median."""
    memory, handles = {}, {}
    for at_s in AT_S:
        reached = [next(use for use in life if use[0] >= at_s) for life in lives if life and life[-1][0] >= at_s]
        if reached:
            name = f"{at_s} s, {len(reached)} lives" if len(lives) > 1 else f"{at_s} s"
            memory[name] = round(statistics.median(use[2] for use in reached), 1)
            handles[name] = statistics.median_low([use[3] for use in reached])
    return {"lives": len(lives), "memory_mb": memory, "handles": handles}


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1e3
