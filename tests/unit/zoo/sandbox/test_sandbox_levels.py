"""Which level a machine gives, what happens below the one asked for, and what is left when a sandbox is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from reroll.errors import SandboxError
from reroll_zoo.sandbox import __main__ as command
from reroll_zoo.sandbox import local, selftest, warm
from reroll_zoo.sandbox.base import Limits, Program, Ran
from reroll_zoo.sandbox.config import LocalSandboxConfig, SandboxLevel
from reroll_zoo.sandbox.local import LEVELS, LocalPool

HELLO = Program(source="print('hello')")
ENDLESS = Program(source="import time; time.sleep(600)", limits=Limits(wall_s=600))
HANGS_S = 120
"""What takes longer than this hangs, however busy the machine is."""


def open_pool(level: str = "auto", *, num_processes: int = 1) -> LocalPool:
    try:
        return LocalPool(LocalSandboxConfig.model_validate({"level": level}), num_processes=num_processes)
    except SandboxError as error:
        pytest.skip(str(error))


def forbid(monkeypatch: pytest.MonkeyPatch, *levels: str) -> None:
    """Pretend that the kernel does not give these levels."""
    check = (
        f"if any(level in sys.argv[3] for level in {[f'{level}' for level in levels]!r}): sys.exit('unshare: not permitted')"
    )
    monkeypatch.setattr(warm, "_BOOT", f"import sys\n{check}\n{warm._BOOT}")


def descendants(root: int | None = None) -> set[int]:
    """The processes that this one (or `root`) has started, and those that they have."""
    root = root or os.getpid()
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {root}


async def become(condition: Callable[[], bool]) -> None:
    """Wait for something that comes about by itself."""
    async with asyncio.timeout(HANGS_S):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pids: set[int]) -> bool:
    return not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# The level.


def test_every_level_of_the_config_is_known_from_the_strongest_to_the_weakest() -> None:
    assert set(LEVELS) == set(get_args(SandboxLevel))
    assert LEVELS == ("namespaces", "landlock", "rlimits")


@pytest.mark.parametrize(
    ("level", "fix"), [("namespaces", "level: landlock"), ("landlock", "level: rlimits"), ("rlimits", "kind: remote")]
)
def test_below_the_level_asked_for_nothing_starts_and_the_message_has_the_fix(
    level: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, level)
    before = descendants()
    with pytest.raises(SandboxError, match=f"level {level} .*not permitted.*{fix}"):
        LocalPool(LocalSandboxConfig.model_validate({"level": level}), num_processes=1)
    assert descendants() <= before


async def test_auto_takes_the_best_that_is_left_and_warns_of_the_weakest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid(monkeypatch, "namespaces", "landlock")
    with caplog.at_level(logging.INFO):
        pool = open_pool()
    try:
        assert pool.level == "rlimits"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "programs read files as" in caplog.text
        assert (await pool.run(HELLO)).stdout == "hello\n"
    finally:
        await pool.close()


async def test_the_level_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = open_pool("namespaces")
    await pool.close()
    assert "sandbox level namespaces" in caplog.text


async def test_what_a_program_cannot_be_locked_in_with_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    break_filter = "from reroll_zoo.sandbox.inside import seccomp\nseccomp._MODE_FILTER = 77\nsys.path.remove(root)"
    monkeypatch.setattr(warm, "_BOOT", warm._BOOT.replace("sys.path.remove(root)", break_filter))
    with pytest.raises(SandboxError, match=r"could not lock a program in: .*prctl"):
        LocalPool(LocalSandboxConfig(), num_processes=1)


# The end.


@pytest.mark.parametrize("level", LEVELS)
async def test_close_leaves_no_process_no_folder_and_no_group(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    pool = open_pool(level, num_processes=2)
    await asyncio.gather(*(pool.run(Program(source="open('left', 'w')")) for _ in range(4)))
    started, groups = descendants() - before, [interpreter.group for interpreter in pool.interpreters]
    assert len(started) >= 2
    assert all(Path(group).is_dir() for group in groups if group)
    await pool.close()
    await become(lambda: gone(started))
    assert not any(Path(group).is_dir() for group in groups if group)
    assert list(tmp_path.iterdir()) == []
    await pool.close()


async def test_no_mount_of_a_sandbox_is_seen_outside() -> None:
    before = descendants()
    pool = open_pool("namespaces")
    try:
        await pool.run(HELLO)
        roots = {_device_of_root(pid) for pid in descendants() - before}
        (sandbox_root,) = roots - {_device_of_root(os.getpid()), ""}
        outside = Path("/proc/self/mountinfo").read_text().splitlines()
        assert sandbox_root not in [line.split()[2] for line in outside]
    finally:
        await pool.close()


def _device_of_root(pid: int) -> str:
    """The device that a process has its root on, as its table of mounts says; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[2] for line in lines if line.split()[4] == "/"), "")


@pytest.mark.parametrize("level", LEVELS)
async def test_close_ends_programs_that_run_and_their_calls_raise(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    pool = open_pool(level, num_processes=3)
    calls = []
    if shutil.which("g++"):
        eightfold = "#define R(...) " + "__VA_ARGS__ " * 8
        slow_to_compile = f"{eightfold}\nint a[] = {{R(R(R(R(R(R(R(1,)))))))}}; int main() {{}}"
        calls.append(asyncio.create_task(pool.run(Program(source=slow_to_compile, language="cpp"))))
        await become(lambda: "cc1plus" in map(_name, descendants() - before))
    calls += [asyncio.create_task(pool.run(ENDLESS)) for _ in range(4)]
    await become(lambda: len(pool._channels) == 3)
    started = descendants() - before
    async with asyncio.timeout(HANGS_S):
        await pool.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results)
    await become(lambda: gone(started))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", LEVELS)
async def test_all_ends_with_a_controller_that_is_killed(level: str, tmp_path: Path) -> None:
    await open_pool(level).close()  # Skips where there is no such level.
    script = f"""
import asyncio, sys
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.base import Limits, Program
from reroll_zoo.sandbox.local import LocalPool
async def main():
    pool = LocalPool(LocalSandboxConfig(level={level!r}), num_processes=2)
    nap = Program(source="import time; time.sleep(600)", limits=Limits(wall_s=600))
    calls = [asyncio.create_task(pool.run(nap)) for _ in range(2)]
    while len(pool.interpreters) < 2: await asyncio.sleep(0.01)
    print(*(interpreter.group for interpreter in pool.interpreters), flush=True)
    await asyncio.gather(*calls)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as controller:
        assert controller.stdout is not None
        groups = controller.stdout.readline().decode().split()
        await become(lambda: len(descendants(controller.pid)) > 4)
        family = descendants(controller.pid)
        controller.send_signal(signal.SIGKILL)
    await become(lambda: gone(family))
    await become(lambda: not list(tmp_path.iterdir()))
    await become(lambda: not any(Path(group).is_dir() for group in groups))


# Interpreters that are lost.


async def test_an_interpreter_that_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_TIMEOUT_S", HANGS_S)
    pool = open_pool()
    try:
        pool.idle[0].process.kill()
        pool.idle[0].process.wait()
        assert (await pool.run(HELLO)).stdout == "hello\n"
        source = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'dawdling'); time.sleep(0.7); print('late')"
        call = asyncio.create_task(pool.run(Program(source=source)))
        await become(lambda: "dawdling" in map(_name, descendants()) or call.done())
        (busy,) = pool.interpreters
        os.killpg(busy.process.pid, signal.SIGKILL)
        assert (await call).stdout == "late\n"
        assert len(pool.interpreters) == 1
    finally:
        await pool.close()


async def test_an_interpreter_that_is_stuck_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool()
    stuck, start = pool.idle[0], pool._start

    def start_in_peace() -> warm.WarmInterpreter:
        monkeypatch.setattr(local, "START_TIMEOUT_S", HANGS_S)
        return start()

    monkeypatch.setattr(pool, "_start", start_in_peace)
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.5)
    try:
        os.killpg(stuck.process.pid, signal.SIGSTOP)
        assert (await pool.run(HELLO)).stdout == "hello\n"
        assert stuck not in pool.interpreters
        assert not _alive(stuck.process.pid)
    finally:
        await pool.close()


async def test_a_supervisor_that_is_stuck_costs_its_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_S", 0.3)
    pool = open_pool()
    try:
        source = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'asleep'); time.sleep(600)"
        call = asyncio.create_task(pool.run(Program(source=source, limits=Limits(wall_s=3))))
        await become(lambda: "asleep" in map(_name, descendants()) or call.done())
        (busy,) = pool.interpreters
        os.killpg(busy.process.pid, signal.SIGSTOP)
        assert (await call).status == "timeout"
        monkeypatch.setattr(local, "_GRACE_S", HANGS_S)
        assert (await pool.run(HELLO)).stdout == "hello\n"
    finally:
        await pool.close()


# The self-test.


@pytest.mark.parametrize("level", LEVELS)
def test_the_self_test_prints_a_table_and_succeeds(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main([level])
    printed, words = capsys.readouterr()
    if code == 2:
        pytest.skip(words)
    assert code == 0, printed
    assert "Sandbox level" in printed
    assert printed.count("│ is held back") >= len(selftest.CHECKS) - 3


def test_the_self_test_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forbid(monkeypatch, "namespaces")
    assert command.main(["namespaces"]) == 2
    assert "level: landlock" in capsys.readouterr().err


async def test_the_self_test_notices_a_sandbox_that_holds_nothing() -> None:
    class Open:
        level = "namespaces"

        async def run(self, program: Program) -> Ran:
            return Ran(status="ok", stdout="", stderr="", exit_code=0, wall_s=0)

        async def close(self) -> None: ...

    findings = await selftest.try_out(Open())
    assert not any(finding.held for finding in findings)
    assert [finding.name for finding in findings if not finding.broken] == ["compute in forgotten children"]
