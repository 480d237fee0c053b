"""A worker that hangs is found: it prints the stacks of all its threads and ends, so that whoever waits for it goes on.

What a worker does that must not take long without a sign of life stands in `with at_work():`, and says `beat()` now and then.
Files are read and written outside of it: a slow disk is no hang.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

log = logging.getLogger(__name__)

_PATIENCE = 0.8
"""Share of the limit that work may go without a sign of life; the rest is for noticing."""
NUM_LOOKS = 10
"""In the time of the limit."""

HUNG = 86
"""The exit code of a process that has found itself hanging; of one that could not even look, it is 1."""

_beats: dict[int, float] = {}
"""By thread: when what it is at work on was last seen to go on."""


@contextmanager
def at_work() -> Iterator[None]:
    """What this thread does in here is watched. Also for a whole method: `@at_work()`."""
    thread = threading.get_ident()
    is_outermost = thread not in _beats
    _beats[thread] = time.monotonic()
    try:
        yield
    finally:
        if is_outermost:
            del _beats[thread]


def beat() -> None:
    """What this thread is at work on goes on. Costs nothing; outside of `at_work` it does nothing."""
    thread = threading.get_ident()
    if thread in _beats:
        _beats[thread] = time.monotonic()


def end_if_it_hangs(limit_s: float | None) -> None:
    """From now on this process ends, and prints its stacks, within `limit_s` of the last sign of life of any work in it.

    A thread looks at the work, and winds up a clock of faulthandler's that needs no interpreter to go off: so that is found too
    which never lets another thread run. What a signal stops cannot end itself: its controller does.
    """
    stderr = sys.__stderr__
    if limit_s is None or stderr is None:
        return
    patience_s = limit_s * _PATIENCE

    def look() -> None:
        while True:
            now = time.monotonic()
            if any(now - last > patience_s for last in list(_beats.values())):
                print_stacks()
                os._exit(HUNG)
            faulthandler.dump_traceback_later(patience_s, exit=True, file=stderr)
            time.sleep(limit_s / NUM_LOOKS)

    threading.Thread(target=look, name="watchdog", daemon=True).start()


def print_stacks() -> None:
    """Of all threads. While this one holds the interpreter no other moves, so what is printed is true."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__)


def print_stacks_when_asked() -> None:
    """From now on SIGUSR1 has this process print the stacks of all its threads, also where the interpreter is held.

    For a person to send: threads that move meanwhile may, rarely, crash it.
    """
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal, not by a debugger. False where that cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


class Waits:
    """Calls that have no answer yet: who is waited for, in what, since when."""

    def __init__(self, limit_s: float | None = None) -> None:
        """Work that shows no sign of life for so long counts as hanging; None: none does."""
        self.limit_s = limit_s
        self.stacks: dict[str, Callable[[], None]] = {}
        """By worker: has it print its stacks."""
        self._numbers = count()
        self._open: dict[int, tuple[str, str, float]] = {}

    def begin(self, worker: str, call: str) -> int:
        """Returns what `end` takes."""
        number = next(self._numbers)
        self._open[number] = worker, call, time.monotonic()
        return number

    def end(self, number: int) -> None:
        self._open.pop(number, None)

    def of(self, worker: str) -> str:
        """`TrainWorker.train for 612 s`: what a worker is waited for longest; empty if it is not."""
        found = [(since_s, call) for name, call, since_s in self._open.values() if name == worker]
        if not found:
            return ""
        since_s, call = min(found)
        return f"{call} for {time.monotonic() - since_s:.0f} s"

    def has_hung(self, worker: str, exit_code: int) -> bool:
        """Whether a worker that left so has ended itself because it hung: by its code, or by how long it is waited for."""
        return exit_code == HUNG or (exit_code == 1 and self.may_hang(worker))

    def may_hang(self, worker: str) -> bool:
        """Whether a worker is waited for so long that it may have ended itself."""
        waits = [since_s for name, _, since_s in self._open.values() if name == worker]
        return self.limit_s is not None and bool(waits) and time.monotonic() - min(waits) >= self.limit_s / 2

    def tell(self, worker: str) -> None:
        """Log that a worker hangs and who else is waited for, and have all print their stacks."""
        others = dict.fromkeys(name for name, _, _ in self._open.values() if name != worker)
        listed = ", ".join(f"{other} in {self.of(other)}" for other in others) or "nobody"
        log.warning("worker %s hangs: it is waited for in %s; besides it: %s", worker, self.of(worker), listed)
        for print_stacks in self.stacks.values():
            print_stacks()
