"""`reroll train` as two processes: the controller, and one that waits for it and starts it anew when it is killed.

The one that waits is what the user sees: signals sent to it reach the controller, and it ends as the controller does. It has
loaded nothing yet when it forks, so it takes no time to start and next to no memory, and every controller starts afresh.

Once the run has been under way for a minute there is a third: a spare, which loads what a controller needs (torch: seconds of
a core), has what the workers are forked from loaded, and waits to be the next one.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from reroll.pipeline.restarts import Restarts
from reroll.runtime.foreground import take_ctrl_c_as
from reroll.runtime.subprocesses import exit_reason, follow_parent, go_on_without_parent
from reroll_zoo.forks.forks import children, start_as_in
from reroll_zoo.replicas.place import remove_all_of

CTRL_C = signal.SIGUSR2
"""As what Ctrl-C is passed on. A terminal sends SIGINT to both processes, `kill` to one or to all: taken from here alone, one
Ctrl-C is always one."""
_PASSED_ON = {signal.SIGINT: CTRL_C, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGHUP}
_FAULTS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
"""What ends a process that nobody asked to leave."""
LOOK_EVERY_S = 1.0
"""Whether it is time for a spare."""
SPARE_AFTER_S = 60.0
"""Of a run that is under way: a short one never pays for a spare, and one that has just begun loses little without."""
SPARE_AGAIN_AFTER_S = 2.0
"""Of one that was started anew: what has happened once may happen again soon."""
SPARE = "reroll spare"
"""As what `ps` and `top` show one."""
_NEEDED = "reroll.pipeline.run"
"""What a controller has to load."""

waits_here: int | None = None
"""In a controller: the process that waits for it, and lives as long as the run."""


def supervise(restarts: Restarts) -> None:
    """Returns in the controller's process, again for each restart. The process that called this waits, and ends with it."""
    if not _may_fork():
        return
    stops = set(_PASSED_ON)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # By nohup.
        stops.remove(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, CTRL_C, signal.SIGCHLD})
    parent, spare = os.getpid(), None
    while True:
        pid = spare.call() if spare else None
        if pid is None:
            pid = _fork()
            if pid == 0:
                _be_controller(parent, before)
                return
        code, spare = _exit_code(pid, stops, restarts)
        if spare and spare.is_me:
            _be_controller(parent, before)
            return
        if -code not in _FAULTS:
            _end_with(code, spare)
        told = f"the controller was killed{exit_reason(code)}"
        if not restarts.again():
            _tell(f"{told}: the last checkpoint stands, --resume goes on from it")
            _end_with(code, spare)
        _tell(restarts.told(told))
        if stop := signal.sigtimedwait(stops, restarts.pause_s):
            _end_with(-stop.si_signo, spare)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _be_controller(parent: int, mask: Iterable[int]) -> None:
    """In a process that `parent` has forked: take signals as a controller does, with this mask."""
    global waits_here
    waits_here = parent
    follow_parent(parent)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(CTRL_C, signal.default_int_handler)
    take_ctrl_c_as(CTRL_C)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Spare:
    """A process that has loaded what a controller needs, and waits to be called, or for the end of the one that made it."""

    def __init__(self) -> None:
        """In the spare itself this returns once it is called."""
        self._ear, self._mouth = os.pipe()
        self._pid = _fork()
        self.is_me = self._pid == 0
        if self.is_me:
            os.close(self._mouth)
            self._wait()
        else:
            os.close(self._ear)

    def _wait(self) -> None:
        go_on_without_parent()
        name = Path("/proc/self/comm")
        before = name.read_text()
        name.write_text(SPARE)
        importlib.import_module(_NEEDED)
        # Only now: what is forked from shall have the environment that libraries make when they are loaded.
        for controller in set(children(os.getppid())) - {os.getpid()}:
            start_as_in(controller)
        if not os.read(self._ear, 1):
            os._exit(0)
        os.close(self._ear)
        name.write_text(before)

    def call(self) -> int | None:
        """Let it be the controller, also if a signal has stopped it. Returns its number; None if it has ended."""
        ended, _ = os.waitpid(self._pid, os.WNOHANG)
        if not ended:
            os.kill(self._pid, signal.SIGCONT)
        with suppress(BrokenPipeError):  # It ends just now: as a controller that was killed.
            os.write(self._mouth, b"!")
        os.close(self._mouth)
        return None if ended else self._pid

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _may_fork() -> bool:
    """A process with threads of others must not be copied, nor one that has loaded what it would share with the copy."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def _exit_code(pid: int, stops: set[signal.Signals], restarts: Restarts) -> tuple[int, _Spare | None]:
    """Wait for the end of the controller, and pass on what comes meanwhile. Makes a spare once the run has been under way for a
    while; in that process, too, this returns."""
    spare: _Spare | None = None
    under_way_s: float | None = None
    spare_after_s = SPARE_AGAIN_AFTER_S if restarts.num else SPARE_AFTER_S
    while True:
        came = signal.sigtimedwait({*stops, signal.SIGCHLD}, LOOK_EVERY_S)
        if came and came.si_signo in stops:
            os.kill(pid, _PASSED_ON[signal.Signals(came.si_signo)])
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), spare
        if under_way_s is None and restarts.is_under_way:
            under_way_s = time.monotonic()
        if spare is None and under_way_s is not None and time.monotonic() - under_way_s >= spare_after_s:
            spare = _Spare()
            if spare.is_me:
                return 0, spare


def _end_with(code: int, spare: _Spare | None) -> None:
    """As the controller ended."""
    if spare:
        spare.end()
    remove_all_of(os.getpid())
    if code < 0:
        if -code != signal.SIGKILL:  # Which nobody can do otherwise about.
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def _tell(what: str) -> None:
    Console(stderr=True, highlight=False).print(what, style="yellow", markup=False, soft_wrap=True)
