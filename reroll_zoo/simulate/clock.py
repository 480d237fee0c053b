"""An event loop whose time jumps to the next timer whenever nothing is ready: hours of a run pass in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every coroutine waits, and no timer will ever wake one: a real run would hang here."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0, stands still while anything is ready, and never runs backwards. It waits for no file and no socket."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._virtual_s += seconds


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
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
