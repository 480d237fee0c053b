from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import weakref

from reroll.runtime.base import Placement, WorkerInfo
from reroll.runtime.local import LocalRuntime


class Token:
    """Something a call may keep alive."""


class Keeper:
    """A worker that shows where it runs and what it is given."""

    def __init__(self, info: WorkerInfo, barrier: threading.Barrier | None = None) -> None:
        if barrier is not None:
            barrier.wait(60)
        self.device = info.device
        self.thread = threading.current_thread().name

    def look(self) -> tuple[str, str, str]:
        return self.device, self.thread, threading.current_thread().name

    def take(self, token: Token) -> None:
        return None

    def wait_for(self, event: threading.Event) -> None:
        event.wait(60)


async def test_a_gpu_index_is_the_cuda_device_of_this_process() -> None:
    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(Keeper, Placement("policy", ("cpu", "1")))
        assert [device for device, _, _ in await workers.broadcast(Keeper.look)] == ["cpu", "cuda:1"]


async def test_workers_are_built_at_the_same_time_and_each_on_the_thread_that_serves_it() -> None:
    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(Keeper, Placement("policy", ("cpu", "cpu")), threading.Barrier(2))
        for _, built_on, called_on in await workers.broadcast(Keeper.look):
            assert built_on == called_on != threading.current_thread().name


async def test_an_idle_worker_keeps_nothing_of_the_last_call_alive() -> None:
    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(Keeper, Placement("policy", ("cpu",)))
        token = Token()
        gone = weakref.ref(token)
        await workers.one(0, Keeper.take, token)
        del token
        async with asyncio.timeout(60):
            while gone() is not None:
                gc.collect()
                await asyncio.sleep(0.01)


async def test_a_call_cancelled_before_its_turn_is_not_run() -> None:
    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(Keeper, Placement("policy", ("cpu",)))
        release = threading.Event()
        busy = asyncio.create_task(workers.one(0, Keeper.wait_for, release))
        never = threading.Event()
        queued = asyncio.create_task(workers.one(0, Keeper.wait_for, never))
        await asyncio.sleep(0.01)
        queued.cancel()
        await asyncio.sleep(0.01)
        release.set()
        await busy
        await asyncio.wait_for(workers.one(0, Keeper.look), 60)


def test_a_stuck_worker_does_not_keep_the_interpreter_from_exiting() -> None:
    script = """
        import asyncio, time
        from reroll.runtime.base import Placement
        from reroll.runtime.local import LocalRuntime

        class Stuck:
            def __init__(self, info): pass
            def hang(self): time.sleep(600)

        async def main():
            workers = await LocalRuntime().spawn(Stuck, Placement("stuck", ("cpu",)))
            try:
                await asyncio.wait_for(workers.one(0, Stuck.hang), 0.1)
            except TimeoutError:
                print("left")

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "left\n"
