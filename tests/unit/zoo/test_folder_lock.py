"""Who may work in a run's folder: real processes that hold it, die, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import reroll_zoo.folder_lock as lock_module
from reroll.errors import RunFolderError
from reroll.observe.run_folder import LOCK_FILE
from reroll_zoo.folder_lock import RunLock

HOLDER = """
import sys
from pathlib import Path
from reroll_zoo.folder_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until it is told to let go, or dies."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


def take(folder: Path, **options: float) -> None:
    with RunLock(folder, **options):  # type: ignore[arg-type]
        pass


def rewrite(folder: Path, **changes: object) -> None:
    """Say something else in the lock, as if another machine had written it."""
    path = folder / LOCK_FILE
    seen_s = path.stat().st_mtime
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, (seen_s, seen_s))


def test_a_folder_that_a_living_process_holds_is_refused_with_its_name(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        with pytest.raises(RunFolderError, match=rf"in use by process {holder.pid} on \S+, since 20\S+ .*another run.name"):
            take(tmp_path)
        assert (tmp_path / LOCK_FILE).exists()


def test_a_stopped_process_still_holds_its_folder(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(RunFolderError, match="in use"):
            take(tmp_path)


def test_death_lets_go(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        holder.kill()
        holder.wait()
        assert (tmp_path / LOCK_FILE).exists()
        take(tmp_path)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_process_that_was_given_the_dead_ones_number_holds_nothing(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        holder.kill()
        holder.wait()
        rewrite(tmp_path, pid=os.getpid())
        take(tmp_path)


def test_two_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        take(tmp_path)
    take(tmp_path)


def test_whoever_waits_says_so_and_gets_the_folder_when_it_is_let_go(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        told: list[str] = []

        def tell_and_let_go(text: str) -> None:
            told.append(text)
            holder.communicate("go\n")

        with RunLock(tmp_path, wait_s=200.0, on_wait=tell_and_let_go) as mine:
            mine.check()
        assert len(told) == 1
        assert f"in use by process {holder.pid}" in told[0]


def test_whoever_waits_gives_up_at_its_bound(tmp_path: Path) -> None:
    with held_by_another(tmp_path), pytest.raises(RunFolderError, match="in use"):
        take(tmp_path, wait_s=0.05)


def test_a_holder_on_another_machine_lives_as_long_as_it_touches_its_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        rewrite(tmp_path, system="another boot", host="node7", pid=1)
        with pytest.raises(RunFolderError, match=r"process 1 on node7.*void 120 s after its last sign of life"):
            take(tmp_path)
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        take(tmp_path)


def test_the_holder_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = threading.Event()
    utime = os.utime

    def note(path: Path) -> None:
        utime(path)
        touched.set()

    monkeypatch.setattr(lock_module, "BEAT_S", 0.01)
    monkeypatch.setattr(lock_module.os, "utime", note)
    with RunLock(tmp_path):
        utime(tmp_path / LOCK_FILE, (0, 0))
        touched.clear()
        assert touched.wait(60)
        assert (tmp_path / LOCK_FILE).stat().st_mtime > 0


def test_a_holder_whose_lock_was_taken_finds_out_and_leaves_it_to_the_other(tmp_path: Path) -> None:
    with RunLock(tmp_path) as mine:
        mine.check()
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        rewrite(tmp_path, system="another boot")  # As if this machine had slept, and another had looked at it.
        with RunLock(tmp_path) as other:
            with pytest.raises(RunFolderError, match="was taken from this run: it now belongs to process"):
                mine.check()
            other.check()
            mine.__exit__(None, None, None)
            other.check()


def test_one_of_many_that_find_a_dead_lock_gets_it(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        holder.kill()
        holder.wait()
    results: list[str] = []
    all_are_in, done = threading.Barrier(8), threading.Barrier(8)

    def race() -> None:
        all_are_in.wait()
        try:
            with RunLock(tmp_path):
                results.append("held")
                done.wait()
        except RunFolderError:
            results.append("refused")
            done.wait()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["held", *["refused"] * 7]


def test_a_file_system_without_second_names_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock_module.os, "link", refuse)
    with RunLock(tmp_path) as mine:
        mine.check()
        with pytest.raises(RunFolderError, match="in use"):
            take(tmp_path)
    take(tmp_path)


def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("[]")
    with pytest.raises(RunFolderError, match=r"\.lock is no lock of reroll: .*delete it"):
        take(tmp_path)
