"""What a user may ask of a run while it goes on, beside Ctrl-C: to pause between two steps, to go on, to save. And who asks:
a companion, which stands beside the run and is found by the entry points of the group `reroll.companions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Hands:
    """What a companion may have the run do: deeds by name. May be called from any thread."""

    deeds: Mapping[str, Callable[[], object]]
    is_paused: Callable[[], bool]


class Companion(Protocol):
    """What a run is watched and steered by, such as the page of `reroll train --page`."""

    def beside(self, folder: Path) -> AbstractContextManager[None]:
        """Open from before the run in this folder begins until it has ended, however often it is started anew."""

    def holding(self, hands: Hands) -> AbstractContextManager[str]:
        """Open while the run can be asked for something. Gives what the user is told of it."""


class RunControls:
    """Wishes, for the loop to heed between two steps. Call it in the controller's event loop."""

    def __init__(self) -> None:
        self.is_paused = False
        self._wants_checkpoint = False
        self._changed = asyncio.Event()

    def pause(self) -> None:
        """The step under way is finished; the next does not begin. Samples go on as far as the staleness budget allows."""
        self.is_paused = True
        self._changed.set()

    def resume(self) -> None:
        self.is_paused = False
        self._changed.set()

    def ask_for_checkpoint(self) -> None:
        """A checkpoint is taken as soon as no step is under way."""
        self._wants_checkpoint = True
        self._changed.set()

    def take_checkpoint_wish(self) -> bool:
        """Whether one was asked for since the last call."""
        wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return wanted

    async def changed(self) -> None:
        """Wait for the next wish."""
        await self._changed.wait()
        self._changed.clear()

    def hands(self, *, stop: Callable[[], None]) -> Hands:
        """These wishes and Ctrl-C's, for threads beside the running event loop."""
        loop = asyncio.get_running_loop()
        deeds = {"pause": self.pause, "resume": self.resume, "checkpoint": self.ask_for_checkpoint, "stop": stop}
        in_loop = {name: partial(loop.call_soon_threadsafe, deed) for name, deed in deeds.items()}
        return Hands(in_loop, is_paused=lambda: self.is_paused)
