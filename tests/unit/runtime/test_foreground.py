"""A coroutine that a caller waits for, with and without an event loop around the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

from reroll.runtime.foreground import Foreground


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> None:
    raise ValueError("as it was raised")


def inside_a_loop(call: Callable[[], object]) -> object:
    """The call as a notebook's cell makes it: synchronous, on the main thread, below a running loop."""

    async def cell() -> object:
        return call()

    return asyncio.run(cell())


def outside(call: Callable[[], object]) -> object:
    return call()


@pytest.fixture(params=[outside, inside_a_loop])
def called(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], object]:
    place: Callable[[Callable[[], object]], object] = request.param
    return place


Place = Callable[[Callable[[], object]], object]


def test_the_caller_gets_the_result_and_the_error(called: Place) -> None:
    assert called(lambda: Foreground().run(answer())) == 42
    with pytest.raises(ValueError, match="as it was raised"):
        called(lambda: Foreground().run(fail()))


def press_ctrl_c() -> None:
    """On the main thread, where the system delivers it."""
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()


def test_the_first_ctrl_c_asks_the_work_to_stop(called: Place) -> None:
    foreground = Foreground()

    async def work() -> str:
        asked = asyncio.Event()
        with foreground.on_interrupt(asked.set):
            press_ctrl_c()
            await asked.wait()
            return "left by itself"

    assert called(lambda: foreground.run(work())) == "left by itself"


def test_the_second_ctrl_c_quits_at_once_and_the_work_cleans_up(called: Place) -> None:
    foreground, cleaned = Foreground(), []

    async def work() -> None:
        asked = asyncio.Event()
        try:
            with foreground.on_interrupt(asked.set):
                press_ctrl_c()
                await asked.wait()
                press_ctrl_c()
                await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        called(lambda: foreground.run(work()))
    assert cleaned == [True]


def test_work_that_did_not_ask_for_it_is_cancelled_by_ctrl_c(called: Place) -> None:
    async def work() -> None:
        press_ctrl_c()
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        called(lambda: Foreground().run(work()))


def test_ctrl_c_is_pythons_own_afterwards(called: Place) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    foreground = Foreground()

    async def work() -> None:
        with foreground.on_interrupt(lambda: None):
            await asyncio.sleep(0)

    called(lambda: foreground.run(work()))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_ctrl_c_that_comes_before_the_work_has_begun_is_not_lost(called: Place) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    foreground = Foreground()
    foreground._interrupt()  # what the signal's handler calls: no test can press a key between two lines
    with pytest.raises(KeyboardInterrupt):
        called(lambda: foreground.run(work()))
