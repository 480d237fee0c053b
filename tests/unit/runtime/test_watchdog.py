"""Workers that hang: found within the limit, named, with their stacks, and treated as dead."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
from process_probe import Probe

from reroll.errors import WorkerDied
from reroll.runtime.base import Placement, Workers
from reroll.runtime.processes import ProcessRuntime
from reroll.runtime.watchdog import Waits

LIMIT_S = 3.0
"""Long enough for a sign of life on a busy machine."""
ONE, TWO = Placement("probe", ("cpu",)), Placement("probe", ("cpu", "cpu"))


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    async with ProcessRuntime(watchdog_s=LIMIT_S) as made:
        yield made


@pytest.mark.parametrize("holding_the_gil", [False, True])
async def test_a_worker_that_hangs_ends_and_shows_where(
    runtime: ProcessRuntime, capfd: pytest.CaptureFixture[str], holding_the_gil: bool
) -> None:
    workers = await runtime.spawn(Probe, ONE)
    with pytest.raises(WorkerDied, match=r"probe\[0\] is gone: its process hung in Probe.hang for \d+ s, printed its stacks"):
        await workers.one(0, Probe.hang, holding_the_gil=holding_the_gil)
    assert 'process_probe.py", line' in capfd.readouterr().err


async def test_who_is_waited_for_is_told_and_all_show_where_they_are(
    runtime: ProcessRuntime, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    workers = await runtime.spawn(Probe, TWO)
    waiting = asyncio.ensure_future(workers.one(1, Probe.work, num_beats=3000, pause_s=0.1))
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerDied):
        await workers.one(0, Probe.hang)
    assert "worker probe[0] hangs: it is waited for in Probe.hang for" in caplog.text
    assert "besides it: probe[1] in Probe.work for" in caplog.text
    said = ""
    while "in work" not in said:  # By the other worker's own thread.
        await asyncio.sleep(0.05)
        said += capfd.readouterr().err
    waiting.cancel()


async def test_work_that_shows_signs_of_life_may_take_longer(runtime: ProcessRuntime) -> None:
    workers = await runtime.spawn(Probe, ONE)
    assert await workers.one(0, Probe.work, num_beats=40, pause_s=0.1) == "done"


async def test_a_worker_without_work_is_not_watched(runtime: ProcessRuntime) -> None:
    workers = await runtime.spawn(Probe, ONE)
    await asyncio.sleep(1.5 * LIMIT_S)
    assert await workers.one(0, Probe.echo, 1) == 1


async def stopped(workers: Workers[Probe]) -> int:
    pid, _ = await workers.one(0, Probe.session)
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_a_worker_that_a_signal_stopped_is_ended_when_somebody_waits_for_it(runtime: ProcessRuntime) -> None:
    workers = await runtime.spawn(Probe, ONE)
    await stopped(workers)
    with pytest.raises(WorkerDied, match="was stopped by a signal, and did not go on within 3 s"):
        await workers.one(0, Probe.echo, 1)


async def test_a_worker_that_goes_on_in_time_is_let_be() -> None:
    async with ProcessRuntime(watchdog_s=100.0) as runtime:
        workers = await runtime.spawn(Probe, ONE)
        pid = await stopped(workers)
        call = asyncio.ensure_future(workers.one(0, Probe.echo, 1))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        assert await call == 1


def test_the_longest_wait_for_a_worker_is_told() -> None:
    waits = Waits(limit_s=1000.0)
    first = waits.begin("policy[0]", "TrainWorker.train")
    waits.begin("policy[0]", "TrainWorker.written")
    assert waits.of("policy[0]") == "TrainWorker.train for 0 s"
    waits.end(first)
    assert waits.of("policy[0]") == "TrainWorker.written for 0 s"
    assert not waits.may_hang("policy[0]")
    assert waits.of("policy[1]") == ""
