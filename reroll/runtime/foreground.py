"""A coroutine that a caller waits for: in a script, and where an event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

# A signal that comes just before a thread waits for a lock or a socket does not end that wait, so nothing waits for longer.
LOOK_FOR_CTRL_C_S = 0.2
_ctrl_c = signal.SIGINT


def take_ctrl_c_as(number: signal.Signals) -> None:
    """From now on Ctrl-C reaches this process as this signal, by way of the one that started it."""
    global _ctrl_c
    _ctrl_c = number


class Foreground:
    """Runs one coroutine to its end, and hands it the user's first Ctrl-C (or interrupted kernel) if it asks for it.

    Any other Ctrl-C cancels the coroutine, and then raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._on_interrupt: Callable[[], None] | None = None
        self._cancelled = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the coroutine's result."""
        with self._taking_ctrl_c():
            try:
                return self._result(work)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                raise KeyboardInterrupt from None

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._noted(work))
        # This thread's loop is busy with the caller and cannot run another: the work gets a thread of its own. What the
        # caller's context holds goes with it, or a notebook would not know to which cell the output belongs.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reroll") as thread:
            context = contextvars.copy_context()
            result = thread.submit(context.run, asyncio.run, self._noted(work))
            while not wait([result], LOOK_FOR_CTRL_C_S).done:
                pass
            return result.result()

    @contextmanager
    def on_interrupt(self, ask_to_stop: Callable[[], None]) -> Iterator[None]:
        """While this is open, the first Ctrl-C and every SIGTERM call `ask_to_stop` in the coroutine's loop, and do nothing
        else. For the coroutine itself to enter.
        """
        loop = asyncio.get_running_loop()
        self._on_interrupt = ask_to_stop
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a platform without them
            loop.add_signal_handler(signal.SIGTERM, ask_to_stop)
        try:
            yield
        finally:
            self._on_interrupt = None
            loop.remove_signal_handler(signal.SIGTERM)

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:  # before there was anything to cancel
            self._cancel()
        awake = asyncio.create_task(_wake_now_and_then())
        try:
            return await work
        finally:
            awake.cancel()

    @contextmanager
    def _taking_ctrl_c(self) -> Iterator[None]:
        """Signals reach the main thread, and loops there would keep them to themselves: while it waits, they go to the work."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(_ctrl_c, lambda *_: self._interrupt())
        try:
            yield
        finally:
            signal.signal(_ctrl_c, before)

    def _interrupt(self) -> None:
        if self._on_interrupt is not None and self._loop is not None:
            ask_to_stop, self._on_interrupt = self._on_interrupt, None
            self._loop.call_soon_threadsafe(ask_to_stop)
        elif self._cancelled:  # and it does not end: what this thread does right now is left
            raise KeyboardInterrupt
        else:
            self._cancelled = True
            self._cancel()

    def _cancel(self) -> None:
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)


async def _wake_now_and_then() -> None:
    while True:
        await asyncio.sleep(LOOK_FOR_CTRL_C_S)
