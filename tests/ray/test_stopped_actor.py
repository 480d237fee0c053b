"""A worker on Ray that a signal stops for good cannot end itself: its controller finds it."""

from __future__ import annotations

import os
import signal
import time

import pytest

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
