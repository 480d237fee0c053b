"""What a user may ask of a run while it goes on, beside Ctrl-C: to pause between two steps, to go on, to save."""

from __future__ import annotations

import asyncio


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
