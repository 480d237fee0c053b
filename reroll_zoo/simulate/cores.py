"""Cores that a trainer and its engines share where a run has no GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Cores:
    """Whoever is at work is slowed by each other who is: by nothing where `sharing` is 0, where it is 1 so much that all get an
    equal share, and side by side nobody is faster than one after the other."""

    def __init__(self, sharing: float = 1.0) -> None:
        self._sharing = sharing
        self._busy: set[object] = set()
        self.listeners: list[Callable[[], None]] = []
        """Called whenever shares change."""

    @property
    def speed(self) -> float:
        """Of each that is at work, against one that is alone."""
        return 1 / (1 + self._sharing * max(0, len(self._busy) - 1))

    def set_busy(self, who: object, is_busy: bool) -> None:
        """Begin or cease to work."""
        if (who in self._busy) == is_busy:
            return
        (self._busy.add if is_busy else self._busy.discard)(who)
        for listener in list(self.listeners):
            listener()

    async def work(self, seconds: float) -> None:
        """Do what takes so long alone."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self.listeners.append(changed.set)
        self.set_busy(changed, True)
        try:
            while seconds > 1e-9:
                changed.clear()
                started_s, speed = loop.time(), self.speed
                try:
                    await asyncio.wait_for(changed.wait(), seconds / speed)
                except TimeoutError:
                    return
                seconds -= (loop.time() - started_s) * speed
        finally:
            self.listeners.remove(changed.set)
            self.set_busy(changed, False)
