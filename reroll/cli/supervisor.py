"""`reroll train` as two processes: the controller, and one that waits for it and starts it anew when it is killed.

The one that waits is what the user sees: signals sent to it reach the controller, and it ends as the controller does. It has
loaded nothing yet when it forks, so it takes no time to start and next to no memory, and every controller starts afresh.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from rich.console import Console

from reroll.pipeline.restarts import Restarts
from reroll.runtime.children import epitaph, follow_parent
from reroll.runtime.foreground import take_ctrl_c_as

CTRL_C = signal.SIGUSR2
"""As what Ctrl-C is passed on. A terminal sends SIGINT to both processes, `kill` to one or to all: taken from here alone, one
Ctrl-C is always one."""
_PASSED_ON = {signal.SIGINT: CTRL_C, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGHUP}
_FAULTS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
"""What ends a process that nobody asked to leave."""


def supervise(restarts: Restarts) -> None:
    """Returns in the controller's process, again for each restart. The process that called this waits, and ends with it."""
    if not _may_fork():
        return
    stops = set(_PASSED_ON)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # By nohup.
        stops.remove(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, CTRL_C, signal.SIGCHLD})
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            follow_parent(parent)
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(CTRL_C, signal.default_int_handler)
            take_ctrl_c_as(CTRL_C)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        code = _exit_code(pid, stops)
        if -code not in _FAULTS:
            _end_with(code)
        told = f"the controller was killed{epitaph(code)}"
        if not restarts.again():
            _tell(f"{told}: the last checkpoint stands, --resume goes on from it")
            _end_with(code)
        _tell(restarts.told(told))
        if stop := signal.sigtimedwait(stops, restarts.pause_s):
            _end_with(-stop.si_signo)


def _may_fork() -> bool:
    """A process with threads of others must not be copied, nor one that has loaded what it would share with the copy."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def _exit_code(pid: int, stops: set[signal.Signals]) -> int:
    """Wait for the end of the controller, and pass on what comes meanwhile."""
    while True:
        number = signal.sigwait({*stops, signal.SIGCHLD})
        if number in stops:
            os.kill(pid, _PASSED_ON[signal.Signals(number)])
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _end_with(code: int) -> None:
    """As the controller ended."""
    if code < 0:
        if -code != signal.SIGKILL:  # Which nobody can do otherwise about.
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def _tell(what: str) -> None:
    Console(stderr=True, highlight=False).print(what, style="yellow", markup=False, soft_wrap=True)
