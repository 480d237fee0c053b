"""What only processes promise. What all runtimes do is in tests/contract/test_runtime_contract.py."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_probe import NeverBuilt, Probe

from reroll.errors import RerollError, WorkerDied, WorkerTimeout
from reroll.runtime.base import Placement, Workers
from reroll.runtime.frames import MIN_SHARED_BYTES, CannotTravel
from reroll.runtime.processes import ProcessRuntime

TWO = Placement("probe", ("cpu", "cpu"))


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    async with ProcessRuntime() as made:
        yield made


@pytest.fixture
async def pair(runtime: ProcessRuntime) -> Workers[Probe]:
    return await runtime.spawn(Probe, TWO)


def is_there(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], *, budget_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + budget_s
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def read_pids(file: Path, *, num: int) -> list[int]:
    deadline_s = time.monotonic() + 120
    while not file.exists() or len(file.read_text().split()) < num:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return [int(pid) for pid in file.read_text().split()]


async def test_each_worker_is_a_process_that_leads_a_session_of_its_own(pair: Workers[Probe]) -> None:
    sessions = await pair.broadcast(Probe.session)
    assert len({os.getpid(), *(pid for pid, _ in sessions)}) == 3
    assert all(pid == session for pid, session in sessions)
    assert await pair.one(0, Probe.thread) == "MainThread"


async def test_a_worker_that_overruns_ends_with_all_that_it_started(pair: Workers[Probe], tmp_path: Path) -> None:
    call = asyncio.create_task(pair.one_within(5, 1, Probe.hang_with_children, tmp_path / "pids"))
    children = await asyncio.to_thread(read_pids, tmp_path / "pids", num=2)
    assert all(map(is_there, children))
    first, _ = await pair.one(0, Probe.session)
    with pytest.raises(WorkerTimeout, match="hang_with_children took longer than 5 s"):
        await call
    wait_until_gone(children)
    (same, _), (other, _) = await pair.broadcast(Probe.session)
    assert same == first != other


async def test_a_dead_worker_tells_how_it_ended(pair: Workers[Probe]) -> None:
    with pytest.raises(WorkerDied, match=r"probe\[0\] is gone: its process died \(exit code 3\)") as caught:
        await pair.one(0, Probe.leave, 3)
    assert caught.value.how == "died (exit code 3)"
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        await pair.one(1, Probe.signal_itself, signal.SIGSEGV)


async def test_a_worker_that_is_not_built_yet_is_ended_and_not_asked_to_close(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reroll.runtime.processes.STOP_TIMEOUT_S", 600.0)
    spawning = asyncio.create_task(runtime.spawn(NeverBuilt, Placement("probe", ("cpu",)), tmp_path / "pid"))
    (pid,) = await asyncio.to_thread(read_pids, tmp_path / "pid", num=1)
    spawning.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({spawning})
    assert spawning.cancelled()
    wait_until_gone([pid])


async def test_a_sigterm_that_all_are_sent_leaves_workers_to_the_controller(pair: Workers[Probe]) -> None:
    assert await pair.one(0, Probe.signal_itself, signal.SIGTERM) == "alive"


async def test_a_worker_that_babbles_or_hangs_up_is_ended_and_told(
    pair: Workers[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reroll.runtime.processes.LEAVE_TIMEOUT_S", 0.1)
    with pytest.raises(WorkerDied, match=r"sent what is no message \(b'garbage"):
        await pair.one(0, Probe.babble)
    with pytest.raises(WorkerDied, match="closed its connection and was killed"):
        await pair.one(1, Probe.hang_up)


@pytest.mark.parametrize("number", [0, 1, 1000])
async def test_a_worker_that_answers_what_waits_for_no_answer_is_ended(pair: Workers[Probe], number: int) -> None:
    with pytest.raises(WorkerDied, match=f"an answer to call {number}, which waits for none") as caught:
        await pair.one(0, Probe.answer_another, number)
    assert caught.value.had_read


async def test_stray_bytes_between_two_calls_are_no_doing_of_the_second(pair: Workers[Probe]) -> None:
    """However long the controller does not look."""
    link = pair._processes[0]._link  # type: ignore[attr-defined]
    await pair.one(0, Probe.mutter)
    select.select([link], [], [])
    with pytest.raises(WorkerDied, match=r"sent what is no message \(b'oh' begins no message\)") as caught:
        await pair.one(0, Probe.echo, 1)
    assert caught.value.had_read is False


async def test_whoever_died_tells_whether_it_had_read_the_call(pair: Workers[Probe]) -> None:
    with pytest.raises(WorkerDied) as caught:
        await pair.one(0, Probe.leave, 3)
    assert (caught.value.how, caught.value.had_read) == ("died (exit code 3)", True)
    with pytest.raises(WorkerDied) as caught:
        await pair.one(0, Probe.echo, 1)
    assert (caught.value.how, caught.value.had_read) == ("died (exit code 3)", False)
    pid, _ = await pair.one(1, Probe.session)
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        await asyncio.sleep(0.01)
    call = asyncio.ensure_future(pair.one(1, Probe.echo, 1))
    await asyncio.sleep(0.05)  # It is sent.
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        await call
    assert (caught.value.how, caught.value.had_read) == ("died (SIGKILL)", False)


async def test_an_answer_that_came_in_time_counts_however_late_the_controller_looks(pair: Workers[Probe]) -> None:
    link = pair._processes[0]._link  # type: ignore[attr-defined]
    call = asyncio.ensure_future(pair.one_within(0.05, 0, Probe.echo, "in time"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # It is sent.
    select.select([link], [], [])
    time.sleep(0.1)
    assert await call == "in time"


async def test_a_fork_that_comes_back_answers_nobody(pair: Workers[Probe]) -> None:
    assert await pair.one(0, Probe.fork) > 0
    await asyncio.sleep(0.2)
    assert await pair.one(0, Probe.echo, "still in step") == "still in step"


async def test_what_workers_print_goes_to_standard_error(runtime: ProcessRuntime, capfd: pytest.CaptureFixture[str]) -> None:
    workers = await runtime.spawn(Probe, TWO)
    await workers.one(0, Probe.say, "words of a worker")
    said = capfd.readouterr()
    assert "words of a worker" in said.err
    assert not said.out


async def test_a_call_cancelled_before_its_turn_is_not_run(pair: Workers[Probe], tmp_path: Path) -> None:
    busy = asyncio.create_task(pair.one(0, Probe.remember, 1, gate=tmp_path / "gate"))
    await asyncio.sleep(0.05)
    queued = asyncio.create_task(pair.one(0, Probe.remember, 2))
    await asyncio.sleep(0.05)
    queued.cancel()
    await asyncio.sleep(0)
    link = pair._processes[0]._link  # type: ignore[attr-defined]
    while fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4):  # What the worker has not read yet.
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # What it has read it soon knows: nobody is told when.
    (tmp_path / "gate").touch()
    await busy
    assert await pair.one(0, Probe.remember, 3) == [1, 3]


@pytest.mark.parametrize("num_bytes", [0, 8, MIN_SHARED_BYTES // 2, MIN_SHARED_BYTES * 20])
async def test_arrays_come_back_whole_and_what_a_worker_writes_into_them_is_its_own(
    pair: Workers[Probe], num_bytes: int
) -> None:
    array = np.arange(num_bytes // 8, dtype=np.int64)
    for back in await pair.broadcast(Probe.echo, array):
        assert np.array_equal(back, array)
    if len(array):
        assert await pair.broadcast(Probe.add_one, array) == [1, 1]
        assert await pair.scatter(Probe.add_one, [array, array]) == [1, 1]
        assert array[0] == 0


async def test_many_large_messages_pass_each_other(pair: Workers[Probe]) -> None:
    """More than the sockets hold, in both directions at once."""
    values = [(index, "x" * 150_000) for index in range(60)]
    assert await asyncio.gather(*(pair.one(0, Probe.echo, value) for value in values)) == values


async def test_no_descriptor_is_left_behind() -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with ProcessRuntime() as runtime:
        await runtime.spawn(Probe, TWO)  # What forks them stays for the next.
    before = num_open()
    async with ProcessRuntime() as runtime:
        workers = await runtime.spawn(Probe, TWO)
        await workers.broadcast(Probe.echo, np.zeros(MIN_SHARED_BYTES))
        with pytest.raises(WorkerDied):
            await workers.one(0, Probe.leave, 1)
        await workers.restart(0)
    assert num_open() == before


async def test_what_cannot_travel_is_an_error_that_says_what_to_do(runtime: ProcessRuntime, pair: Workers[Probe]) -> None:
    with pytest.raises(CannotTravel, match=r"an argument of Probe.echo cannot be sent.*lock.*make it there"):
        await pair.one(0, Probe.echo, threading.Lock())
    with pytest.raises(CannotTravel, match=r"an answer cannot be sent.*lock.*make it there"):
        await pair.one(0, Probe.lock)
    with pytest.raises(CannotTravel, match=r"what role probe is made of cannot be sent"):
        await runtime.spawn(Probe, TWO, threading.Lock())
    assert await pair.one(0, Probe.echo, 1) == 1


async def test_workers_that_were_started_end_where_one_cannot_be(
    runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class OnlyTwo(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if len(started) == 2:
                raise OSError("no more processes")
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("reroll.runtime.processes.start_otherwise", lambda order, link: None)
    monkeypatch.setattr("reroll.runtime.processes.subprocess.Popen", OnlyTwo)
    with pytest.raises(RerollError, match=r"no process could be started for worker probe\[2\]: no more processes"):
        await runtime.spawn(Probe, Placement("probe", ("cpu",) * 3, runs_user_code=True))
    assert len(started) == 2
    wait_until_gone([process.pid for process in started])


async def test_functions_and_classes_of_no_module_travel(runtime: ProcessRuntime) -> None:
    class Local(Probe):
        def more(self) -> int:
            return 5

    number = 4
    workers = await runtime.spawn(Local, TWO, lambda: number)
    assert await workers.broadcast(Probe.built_with) == [4, 4]
    assert await workers.broadcast(Local.more) == [5, 5]


async def test_many_workers_start_answer_and_end(runtime: ProcessRuntime) -> None:
    workers = await runtime.spawn(Probe, Placement("probe", ("cpu",) * 12))
    pids = [pid for pid, _ in await workers.broadcast(Probe.session)]
    assert len(set(pids)) == 12
    assert await workers.scatter(Probe.echo, range(12)) == list(range(12))
    await workers.stop()
    wait_until_gone(pids)


async def test_a_worker_sees_its_own_gpus_and_its_share_of_the_cores(
    runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("reroll.runtime.cpu.num_usable_cores", lambda: 12)
    assert runtime.num_gpus == 3
    workers = await runtime.spawn(Probe, Placement("probe", ("1", ("0", "2"), "cpu")))
    told = await workers.broadcast(Probe.tell, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    assert told == [["GPU-a", "4"], ["4,7", "4"], ["", "4"]]
    assert await workers.broadcast(Probe.device) == ["cuda:0", "cuda:0", "cpu"]
    alone = await runtime.spawn(Probe, Placement("alone", ("cpu",)))
    assert await alone.one(0, Probe.tell, "OMP_NUM_THREADS") == [None]
    with pytest.raises(RerollError, match=r"role far names GPU 3, but this process sees 3: name others"):
        await runtime.spawn(Probe, Placement("far", ("3",)))


CONTROLLER = """
    import asyncio, ctypes, pathlib, signal, subprocess, sys, time
    import reroll.runtime.processes
    from reroll.runtime.base import Placement
    from reroll.runtime.processes import ProcessRuntime

    class Parent:
        def __init__(self, info):
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        def pids(self):
            import os
            return [os.getpid(), os.getppid(), self.child.pid]
        def hang(self, how):
            pathlib.Path(f"{self.child.pid} is busy").touch()
            if how == "holding the gil":
                ctypes.PyDLL(None).sleep(600)
            time.sleep(600)

    async def main(how):
        if how == "of fresh interpreters":
            reroll.runtime.processes.start_otherwise = lambda order, link: None
        workers = await ProcessRuntime().spawn(Parent, Placement("parent", ("cpu", "cpu")))
        pids = sum(await workers.broadcast(Parent.pids), [])
        file = pathlib.Path(sys.argv[1])
        file.with_suffix(".new").write_text(" ".join(map(str, pids)))
        file.with_suffix(".new").rename(file)
        await workers.broadcast(Parent.hang, how)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Who starts it in the background has it ignored.
        asyncio.run(main(sys.argv[2]))
"""


@contextmanager
def controller_of_two(tmp_path: Path, how: str = "") -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """One whose workers are of a class of the script itself, and busy. With the numbers of both, each followed by its parent's
    and that of a process that it has started."""
    (tmp_path / "controller.py").write_text(textwrap.dedent(CONTROLLER))
    command = [sys.executable, "controller.py", "pids", how]
    controller = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    pids: list[int] = []
    try:
        pids += read_pids(tmp_path / "pids", num=6)
        while len(list(tmp_path.glob("* is busy"))) < 2:
            assert all(map(is_there, pids))
            time.sleep(0.02)
        yield controller, pids
    finally:
        for pid in {controller.pid, *filter(is_there, pids)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        controller.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_controller_that_ends_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """What its workers are forked from ends too."""
    with controller_of_two(tmp_path) as (controller, pids):
        controller.send_signal(number)
        controller.wait(120)
        wait_until_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a stopped process that its parent has ended")
@pytest.mark.parametrize("how", ["holding the gil", "of fresh interpreters"])
def test_a_killed_controller_leaves_no_process_that_a_signal_has_stopped_nor_what_that_has_started(
    how: str, tmp_path: Path
) -> None:
    """Forked workers never let another thread run, besides; and what they are forked from is stopped too."""
    with controller_of_two(tmp_path, how) as (controller, pids):
        for pid in {*pids} - {controller.pid}:
            os.kill(pid, signal.SIGSTOP)
        controller.kill()
        controller.wait(120)
        wait_until_gone(pids)


async def test_a_worker_starts_and_its_end_is_told_though_a_signal_has_stopped_what_it_is_forked_from(
    pair: Workers[Probe],
) -> None:
    [(pid, _), (other, _)] = await pair.broadcast(Probe.session)
    server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await pair.one(0, Probe.session)
    os.kill(server, signal.SIGSTOP)
    await pair.restart(0)
    assert (await pair.one(1, Probe.session))[0] == other


async def test_user_code_computes_with_one_thread_prints_nowhere_and_sees_the_controllers_gpus(
    runtime: ProcessRuntime, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    workers = await runtime.spawn(Probe, Placement("reward", ("cpu",), runs_user_code=True))
    await workers.one(0, Probe.say, "a line of user code")
    told = await workers.one(0, Probe.tell, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    assert told == ["1", "1", "0,1"]
    models = await runtime.spawn(Probe, Placement("policy", ("cpu",)))
    await models.one(0, Probe.say, "a line of the library")
    await runtime.close()
    printed = capfd.readouterr()
    assert "a line of user code" not in printed.out + printed.err
    assert "a line of the library" in printed.err
