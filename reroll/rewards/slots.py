"""Who may use the worker processes: a slow domain must not take them all."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class FairSlots:
    """Turns for several names. Each name has one slot that no other can take; all share the others.

    A shared slot goes to the name that holds the fewest. Within a name, first come is first served.
    """

    def __init__(self, *, num_shared: int) -> None:
        self._num_shared = num_shared
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, name: str) -> None:
        """Wait for a turn; whoever got one gives it back."""
        queue = self._waiting.setdefault(name, deque())
        if not queue and self._is_free_for(name):
            self._held[name] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # The turn came in the moment of the cancellation.
                self.give_back(name)
            raise

    def give_back(self, name: str) -> None:
        """A turn is over."""
        self._held[name] -= 1
        while (next_name := self._next()) is not None:
            turn = self._waiting[next_name].popleft()
            if not turn.cancelled():
                self._held[next_name] += 1
                turn.set_result(None)

    def _is_free_for(self, name: str) -> bool:
        num_shared_taken = sum(max(0, held - 1) for held in self._held.values())
        return self._held[name] == 0 or num_shared_taken < self._num_shared

    def _next(self) -> str | None:
        names = [name for name, queue in self._waiting.items() if queue and self._is_free_for(name)]
        return min(names, key=self._held.__getitem__, default=None)
