"""A worker on Ray that a signal stops for good cannot end itself: its controller finds it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from reroll.errors import WorkerDied
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, WorkerInfo
from reroll_zoo.ray.config import RayRuntimeConfig


class Stoppable:
    """A worker that says who it is, or takes its time."""

    def __init__(self, info: WorkerInfo) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def rest(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def hang(self, begun: Path) -> None:
        begun.touch()
        time.sleep(600)


@pytest.fixture
def others_ray() -> Iterator[None]:
    """One that the runtime did not start: its processes are not sheltered from SIGTERM."""
    ray.init("local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("others_ray")
async def test_a_worker_that_is_told_to_end_ends_in_the_midst_of_a_call_and_serves_none_after_it(tmp_path: Path) -> None:
    async with make_runtime(RayRuntimeConfig(kind="ray")) as runtime:
        workers = await runtime.spawn(Stoppable, Placement("policy", ("cpu",)))
        pid = await workers.one(0, Stoppable.pid)
        stuck = asyncio.ensure_future(workers.one(0, Stoppable.hang, tmp_path / "begun"))
        behind = asyncio.ensure_future(workers.one(0, Stoppable.pid))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        for call in (stuck, behind):
            with pytest.raises(WorkerDied, match=r"policy\[0\] is gone"):
                await call
        await workers.restart(0)
        assert await workers.one(0, Stoppable.pid) != pid


@pytest.mark.usefixtures("others_ray")
async def test_nobody_asks_after_a_worker_that_is_not_waited_for() -> None:
    """Answers that come at the same time as the call's: after Ray is left, to ask once more would start another."""
    async with make_runtime(RayRuntimeConfig(kind="ray", watchdog_s=600.0)) as runtime:
        workers = await runtime.spawn(Stoppable, Placement("policy", ("cpu",)))
        for _ in range(300):
            await workers.one(0, Stoppable.pid)
        await asyncio.sleep(0.1)
        names = [task.get_coro().__name__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert "_look_whether_it_answers" not in names


STARTS_A_RAY = """
import asyncio, os
from reroll.runtime import make_runtime
from reroll_zoo.ray.config import RayRuntimeConfig

before = dict(os.environ)
runtime = make_runtime(RayRuntimeConfig(kind="ray", num_cpus=2))
print(runtime._mark, os.environ.get("REROLL_CHILD") == before.get("REROLL_CHILD"), flush=True)
input()
"""


def marked_processes(mark: str) -> set[str]:
    """Names of the programs that carry it."""
    names = set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_text(errors="replace"):
                names.add((place / "cmdline").read_text().split("\0")[0].rpartition("/")[2])
    return names


@pytest.mark.slow
def test_of_a_ray_that_a_run_has_started_nothing_outlives_the_run_however_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        mark, is_as_before = process.stdout.readline().split()
        assert is_as_before == "True"  # What the controller starts later is not marked.
        assert {"gcs_server", "raylet"} <= marked_processes(mark)
        process.kill()
        deadline_s = time.monotonic() + 120  # Only a hang exceeds it.
        while (left := marked_processes(mark)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert left == set()


@pytest.mark.slow
async def test_a_worker_that_is_stopped_for_good_is_ended_and_can_be_started_anew() -> None:
    async with make_runtime(RayRuntimeConfig(kind="ray", num_cpus=2, watchdog_s=4.0)) as runtime:
        workers = await runtime.spawn(Stoppable, Placement("policy", ("cpu", "cpu")))
        stopped, _ = await workers.broadcast(Stoppable.pid)
        os.kill(stopped, signal.SIGSTOP)
        calls = workers.broadcast(Stoppable.rest, 6.0)  # Longer than the limit: one that works is let be.
        with pytest.raises(WorkerDied, match="did not answer within 4 s"):
            await calls[0]
        assert await calls[1] == "rested"
        await workers.restart(0)
        assert await workers.one(0, Stoppable.pid) != stopped
