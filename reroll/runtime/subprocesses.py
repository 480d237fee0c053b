"""Child processes that run user code: how their end is told, and how they are ended."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

_PARENT_CHECK_S = 1.0
MARK = "REROLL_CHILD"
"""The variable in the environment of a child that says whose it is: a mark, behind those of the processes above it."""
_MAX_ROUNDS = 20


def go_on_without_parent() -> None:
    """Have the kernel let this process go on when its parent ends, if a signal has stopped it, so that it can see that and
    leave. It is not killed, since what it has started would stay; and one that goes on anyway does not notice, as when not the
    parent but only the thread ends that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGCONT, 0, 0, 0)  # PR_SET_PDEATHSIG


def follow_parent(parent_pid: int | None = None) -> None:
    """Let this process die with its parent, even while user code hangs or a signal stops it, and what it started with it if it
    is marked. `parent_pid` is for a parent that may have ended already. To be called by the main thread.
    """
    parent_pid = parent_pid or os.getppid()
    go_on_without_parent()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        end_with_all_it_started()

    threading.Thread(target=watch, name="follow parent", daemon=True).start()


def end_with_all_it_started() -> NoReturn:
    """Leave this process, a child, now; what it started goes first, if it was marked."""
    if mark := os.environ.get(MARK, "").rpartition("/")[2]:
        kill_marked(mark)
    os._exit(1)


def search_path() -> list[str]:
    """Where this process finds modules, for a child to find them too."""
    return [os.path.abspath(path) for path in sys.path]


@contextmanager
def sheltered_from_sigterm() -> Iterator[None]:
    """Processes that are started here never see a SIGTERM, nor do those that they start, until `outlive_sigterm`.

    A batch system sends it to every process of a job. The controller answers it by saving what was trained, for which it needs
    the others, and then ends them. If it is killed itself, they end with it. Not to be held while something is awaited.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_sigterm() -> bool:
    """In a sheltered process: go on when it is sent, but leave the processes that this one starts their own choice. False, and
    nothing is changed, in any other."""
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # Of this thread, and of all that it starts.
    return True


def with_one_thread() -> dict[str, str]:
    """This process's environment, for a child that is one of as many as there are cores: what it computes with (OpenMP, BLAS)
    gets a thread unless the user has said otherwise."""
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | dict(os.environ)


def kill_group(pid: int) -> None:
    """End a process that leads a session of its own, and all that it started, now. Harmless if they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def marked(mark: str, environment: Mapping[str, str]) -> dict[str, str]:
    """A child's environment with a mark, which all that it starts inherits, daemons too. The marks of those above stay."""
    return {**environment, MARK: f"{environment.get(MARK, '')}/{mark}"}


def kill_marked(mark: str) -> None:
    """End every process but this one that carries the mark, whatever session it moved to. Does nothing without /proc."""
    for _ in range(_MAX_ROUNDS):  # What was being started in the meantime is found in the next round.
        found = [pid for pid in _other_pids() if mark.encode() in _marks(pid)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def mark_what_this_starts(mark: str) -> None:
    """From now on what this process starts is marked, and ends with it, however it ends. For one whose parent does not see to
    that, such as an actor of Ray's: a process beside it waits for its end."""
    os.environ.update(marked(mark, os.environ))
    if hasattr(os, "pidfd_open"):
        # Without our packages it starts in a moment.
        subprocess.run([sys.executable, "-I", "-S", __file__, str(os.getpid()), mark], stdin=subprocess.DEVNULL, check=True)


def _kill_marked_after(pid: int, mark: str) -> None:
    """The process beside it. It is no child of the other, which may end those that it knows."""
    end = os.pidfd_open(pid)
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    select.select([end], [], [])
    kill_marked(mark)


def _other_pids() -> list[int]:
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [int(name) for name in names if name.isdecimal() and int(name) != os.getpid()]


def _marks(pid: int) -> list[bytes]:
    """That the process was given; none if it has ended or is another user's."""
    sign = f"{MARK}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return []
    return [mark for variable in variables if variable.startswith(sign) for mark in variable.removeprefix(sign).split(b"/")]


def exit_reason(exit_code: int) -> str:
    """How a process ended, as a user knows it: ` (exit code 3)` or ` (SIGSEGV)`."""
    return f" ({signal.Signals(-exit_code).name})" if exit_code < 0 else f" (exit code {exit_code})"


if __name__ == "__main__":
    _kill_marked_after(int(sys.argv[1]), sys.argv[2])
