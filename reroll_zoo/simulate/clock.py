"""An event loop whose time jumps to the next timer whenever nothing is ready: hours of a run pass in seconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every coroutine waits, and no timer will ever wake one: a real run would hang here."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0, stands still while anything is ready, and never runs backwards. It waits for no file and no socket.

    If it is charged, time passes while anything is done, by the CPU time of this thread: what one core cannot do in time comes
    late, as in a run.
    """

    def __init__(self, *, is_charged: bool = False) -> None:
        self._virtual_s = 0.0
        self._is_charged = is_charged
        self._charged_s = time.thread_time()
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._virtual_s += seconds

    def charge(self) -> None:
        """Let the CPU time pass that was spent since the last call."""
        if self._is_charged:
            now_s = time.thread_time()
            self._virtual_s += max(0.0, now_s - self._charged_s)
            self._charged_s = max(now_s, self._charged_s)

    def exempt(self, cpu_s: float) -> None:
        """So much of the CPU time spent since then was not the controller's."""
        self._charged_s += cpu_s


class _JumpingSelector(selectors.BaseSelector):
    """Where a loop would sleep until something is ready, its clock moves on instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._inner = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("the simulation stands still: every coroutine waits for another")
        due_s = self._loop.time() + timeout
        self._loop.charge()
        if (left_s := due_s - self._loop.time()) > 0:
            self._loop.jump(left_s)
        return []


def run_virtually(main: Coroutine[Any, Any, T], *, is_charged: bool = False) -> T:
    """As `asyncio.run`, on a virtual clock."""
    with asyncio.Runner(loop_factory=partial(VirtualLoop, is_charged=is_charged)) as runner:
        return runner.run(main)
