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
import time
from pathlib import Path
from typing import get_args

import pytest

from reroll.config.sandbox import LocalSandbox, SandboxLevel
from reroll.errors import SandboxError
from reroll.sandbox import __main__ as command
from reroll.sandbox import local, selftest, warm
from reroll.sandbox.base import Program, Ran
from reroll.sandbox.local import LEVELS, LocalPool

HELLO = Program(source="print('hello')")


def open_pool(level: str = "auto", *, num_processes: int = 1) -> LocalPool:
    try:
        return LocalPool(LocalSandbox.model_validate({"level": level}), num_processes=num_processes)
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


def gone(pids: set[int], *, within_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


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
        LocalPool(LocalSandbox.model_validate({"level": level}), num_processes=1)
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
    break_filter = "from reroll.sandbox.inside import seccomp\nseccomp._MODE_FILTER = 77\nsys.path.remove(root)"
    monkeypatch.setattr(warm, "_BOOT", warm._BOOT.replace("sys.path.remove(root)", break_filter))
    with pytest.raises(SandboxError, match=r"could not lock a program in: .*prctl"):
        LocalPool(LocalSandbox(), num_processes=1)


# The end.


@pytest.mark.parametrize("level", LEVELS)
async def test_close_leaves_no_process_no_mount_and_no_folder(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, mounts = descendants(), Path("/proc/self/mountinfo").read_text()
    pool = open_pool(level, num_processes=2)
    await asyncio.gather(*(pool.run(Program(source="open('left', 'w')")) for _ in range(4)))
    started = descendants() - before
    assert len(started) >= 2
    await pool.close()
    assert not any(map(_alive, started))
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert list(tmp_path.iterdir()) == []
    await pool.close()


@pytest.mark.parametrize("level", LEVELS)
async def test_close_ends_programs_that_run_and_their_calls_raise(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    pool = open_pool(level, num_processes=3)
    eightfold = "#define R(...) " + "__VA_ARGS__ " * 8
    slow_to_compile = f"{eightfold}\nint a[] = {{R(R(R(R(R(R(R(1,)))))))}}; int main() {{}}"
    calls = []
    if shutil.which("g++"):
        calls.append(asyncio.create_task(pool.run(Program(source=slow_to_compile, language="cpp"))))
        await asyncio.sleep(0.1)
    calls += [asyncio.create_task(pool.run(Program(source="import time; time.sleep(9)"))) for _ in range(4)]
    await asyncio.sleep(0.6)
    started = descendants() - before
    assert "cc1plus" in map(_name, started) or not shutil.which("g++")
    started_s = time.monotonic()
    await pool.close()
    assert time.monotonic() - started_s < 5
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results)
    assert gone(started)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", LEVELS)
def test_all_ends_with_a_controller_that_is_killed(level: str, tmp_path: Path) -> None:
    open_pool(level)._idle[0].kill()  # Skips where there is no such level.
    script = f"""
import asyncio, sys
from reroll.config.sandbox import LocalSandbox
from reroll.sandbox.base import Program
from reroll.sandbox.local import LocalPool
async def main():
    pool = LocalPool(LocalSandbox(level={level!r}), num_processes=2)
    calls = asyncio.gather(*(pool.run(Program(source="import time; time.sleep(9)")) for _ in range(2)))
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await calls
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        family = descendants(controller.pid)
        assert len(family) > 4
        controller.send_signal(signal.SIGKILL)
    assert gone(family)
    assert _empties(tmp_path)


def _empties(folder: Path) -> bool:
    deadline_s = time.monotonic() + 3
    while time.monotonic() < deadline_s:
        if not list(folder.iterdir()):
            return True
        time.sleep(0.02)
    return False


# Interpreters that are lost.


async def test_an_interpreter_that_died_is_replaced() -> None:
    pool = open_pool()
    try:
        pool._idle[0]._process.kill()
        pool._idle[0]._process.wait()
        assert (await pool.run(HELLO)).stdout == "hello\n"
        call = asyncio.create_task(pool.run(Program(source="import time; time.sleep(0.7); print('late')")))
        await asyncio.sleep(0.3)
        (busy,) = pool._all
        os.killpg(busy._process.pid, signal.SIGKILL)
        assert (await call).stdout == "late\n"
        assert len(pool._all) == 1
    finally:
        await pool.close()


async def test_an_interpreter_that_is_stuck_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_TIMEOUT_S", 1.5)
    pool = open_pool()
    try:
        stuck = pool._idle[0]
        os.killpg(stuck._process.pid, signal.SIGSTOP)
        assert (await pool.run(HELLO)).stdout == "hello\n"
        assert stuck not in pool._all
        assert not _alive(stuck._process.pid)
    finally:
        await pool.close()


async def test_a_supervisor_that_is_stuck_costs_its_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_S", 0.3)
    pool = open_pool()
    try:
        slow = Program(source="import time; time.sleep(9)")
        call = asyncio.create_task(pool.run(Program(source=slow.source, limits=type(slow.limits)(wall_s=1))))
        await asyncio.sleep(0.4)
        (busy,) = pool._all
        os.killpg(busy._process.pid, signal.SIGSTOP)
        assert (await call).status == "timeout"
        assert (await pool.run(HELLO)).stdout == "hello\n"
    finally:
        await pool.close()


# The self-test.


def test_the_self_test_prints_a_table_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command.main([])
    except SandboxError as error:
        pytest.skip(str(error))
    printed = capsys.readouterr().out
    assert code == 0
    assert "Sandbox level" in printed
    assert printed.count("│ is held back") >= 10


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
    assert all(finding.broken for finding in findings)
