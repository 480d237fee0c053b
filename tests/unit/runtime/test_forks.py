"""Workers as forks of a warm process. What they do as workers is in test_processes.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from process_probe import Probe

from reroll.errors import WorkerDied
from reroll.runtime.base import Placement, Workers
from reroll.runtime.processes import ProcessRuntime
from reroll.runtime.starts import Order
from reroll.runtime.subprocesses import marked
from reroll_zoo.forks.forks import fork

TWO = Placement("probe", ("cpu", "cpu"))
NEED_TORCH = ("reroll.training.cluster", "reroll.infer.worker")


class Fork(Probe):
    """Shows where it comes from."""

    def parent(self) -> int:
        return os.getppid()

    def draw(self) -> int:
        return int(np.random.randint(2**31))

    def place(self) -> tuple[str, str]:
        return os.getcwd(), Path("/proc/self/cmdline").read_text().rstrip("\0")

    def descriptors_of_a_program(self) -> set[str]:
        return set(subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout.split())


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    async with ProcessRuntime() as made:
        yield made


async def pair(runtime: ProcessRuntime) -> Workers[Fork]:
    return await runtime.spawn(Fork, TWO)


async def test_all_workers_come_from_one_process_and_are_told_apart(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await pair(runtime)
    monkeypatch.chdir(tmp_path)
    second = await pair(runtime)
    assert len({*await first.broadcast(Fork.parent), *await second.broadcast(Fork.parent)} - {os.getpid()}) == 1
    assert len({*await first.broadcast(Fork.draw), *await second.broadcast(Fork.draw)}) == 4
    places = await second.broadcast(Fork.place)
    assert [folder for folder, _ in places] == [str(tmp_path)] * 2
    assert [title.split("\0")[-1] for _, title in places] == ["probe[0]", "probe[1]"]
    assert await second.broadcast(Fork.descriptors_of_a_program) == [{"0", "1", "2", "3"}] * 2


async def test_a_variable_that_is_set_for_a_while_reaches_the_workers_of_that_while(
    runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await pair(runtime)
    monkeypatch.setenv("REROLL_TEST_FORKS", "set")
    meanwhile = await pair(runtime)
    monkeypatch.delenv("REROLL_TEST_FORKS")
    after = await pair(runtime)
    assert await meanwhile.broadcast(Fork.tell, "REROLL_TEST_FORKS") == [["set"]] * 2
    assert await after.broadcast(Fork.tell, "REROLL_TEST_FORKS") == [[None]] * 2
    parents, other_parents = {*await before.broadcast(Fork.parent)}, {*await meanwhile.broadcast(Fork.parent)}
    assert not parents & other_parents  # Libraries read some when loaded.
    assert {*await after.broadcast(Fork.parent)} == parents, "no other has to load them again"


async def test_workers_end_with_a_server_that_is_killed_and_the_next_come_from_another(runtime: ProcessRuntime) -> None:
    workers = await pair(runtime)
    [parent] = {*await workers.broadcast(Fork.parent)}
    os.kill(parent, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await workers.broadcast(Fork.hang)
    await workers.restart(0)
    assert await workers.one(0, Fork.parent) != parent


async def test_user_code_runs_in_forks_of_a_process_of_its_own_that_has_not_loaded_torch(runtime: ProcessRuntime) -> None:
    plain, user = await pair(runtime), await runtime.spawn(Fork, Placement("reward", ("cpu", "cpu"), runs_user_code=True))
    [parent] = {*await user.broadcast(Fork.parent)}
    assert {parent} != {*await plain.broadcast(Fork.parent)}
    assert "libtorch" not in Path(f"/proc/{parent}/maps").read_text()
    assert len({*await user.broadcast(Fork.draw)}) == 2
    assert [title.split("\0")[-2:] for _, title in await user.broadcast(Fork.place)] == [
        ["reward[0]", "--user-code"],
        ["reward[1]", "--user-code"],
    ]


@pytest.mark.parametrize("runs_user_code", [False, True])
def test_what_workers_are_forked_from_has_loaded_what_they_need_and_has_one_thread(runs_user_code: bool) -> None:
    """Locks that another thread holds would never open in a fork."""
    mark = uuid.uuid4().hex
    ours, theirs = socket.socketpair()
    needed = {"reroll.rewards.worker": "numpy"} if runs_user_code else dict.fromkeys(NEED_TORCH, "libtorch")
    with ours, theirs:
        for module, library in needed.items():
            order = Order("probe[0]", module, marked(mark, os.environ), mark, os.getcwd(), runs_user_code)
            worker = fork(order, theirs)
            end = threading.Thread(target=worker.wait)
            end.start()
            while worker.pid is None:
                time.sleep(0.01)
            parent = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1]
            assert library in Path(f"/proc/{parent}/maps").read_text()
            assert len(os.listdir(f"/proc/{parent}/task")) == 1
            worker.kill()
            end.join()
            assert worker.returncode == -signal.SIGKILL
