"""The process that workers are forked from: `python -m reroll_zoo.forks.server FD KIND ROOM`. Its controller: `forks.py`.

A fresh interpreter takes seconds of a core to load torch and transformers, and a third of one for what a reward needs. This
process loads once for a controller what its workers need, and starts no thread; each worker is a fork of it, in a session,
with an environment, a standard error and a title of its own. It sees no GPU, since nothing that CUDA has begun may be forked:
workers that have one start as fresh interpreters. User code is loaded in forks alone.

Until the controller lets go of a worker that has ended it stays unreaped, so that nobody else gets its number. When the
controller is gone the server ends all workers, those too that a signal has stopped or that never let another thread run, and
leaves. If it is killed itself, each worker sees that the controller is gone, or the server.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NamedTuple, NoReturn

from reroll.config.registry import entry_names
from reroll.runtime import process_worker
from reroll.runtime.cpu import OMP
from reroll.runtime.starts import Order
from reroll.runtime.subprocesses import MARK, go_on_without_parent, kill_marked
from reroll_zoo.forks.forks import LOAD, NUMBER

_ARG_START, _ARG_END = 48, 49
"""Of `/proc/self/stat`, counted from 1: see proc(5)."""
_PARENT_CHECK_S = 1.0


def main() -> None:
    """Serve until the controller is gone."""
    # Whoever started this may have been waiting with more signals blocked than SIGTERM, which `sheltered_from_sigterm` has.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    entry_names("reroll.core_watch")  # Packages are looked through here, once, and not in every worker.
    Server(link).serve()


class Fork(NamedTuple):
    """A worker as the server knows it."""

    pid: int
    status: socket.socket
    mark: str
    """Of it and of all that it starts."""


class Server:
    """Forks workers as it is told, and tells when they end."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._parent = os.getppid()
        go_on_without_parent()
        self._ends: dict[int, Fork] = {}
        """Those that live, by a descriptor that tells their end."""
        self._ended: dict[int, Fork] = {}
        """Those that nobody has let go of, by the descriptor of their status."""

    def serve(self) -> NoReturn:
        """Until the controller is gone."""
        try:
            while os.getppid() == self._parent and self._serve_once():
                pass
        except Exception:
            traceback.print_exc()
        finally:
            for child in self._ends.values():
                kill_marked(child.mark)
            os._exit(0)

    def _serve_once(self) -> bool:
        """Whether the controller is still there."""
        watched: list[int] = [self._link.fileno(), *self._ends, *self._ended]
        ready, _, _ = select.select(watched, [], [], _PARENT_CHECK_S)
        for descriptor in ready:
            if descriptor == self._link.fileno():
                if not self._take():
                    return False
            elif descriptor in self._ends:
                self._tell_end(descriptor)
            else:
                child = self._ended.pop(descriptor)
                os.waitpid(child.pid, 0)
                child.status.close()
        return True

    def _take(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._link, 16, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            told = pickle.load(file)
        if data == LOAD:
            _load(*told)
        else:
            self._fork(told, *descriptors[1:])
        return True

    def _fork(self, order: Order, link: int, status: int, stderr: int) -> None:
        if order.module:
            _load(order.module)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # Or a worker prints it again.
        gc.collect()
        gc.freeze()  # A collection in a worker must not copy what all share.
        try:
            pid = os.fork()
        except OSError as error:  # No memory, or too many processes: this worker's trouble, and nobody else's.
            print(f"no process could be forked for worker {order.name}: {error}", file=sys.stderr)
            for descriptor in (link, status, stderr):
                os.close(descriptor)
            return
        if pid == 0:
            self._become(order, link, status, stderr)
        child = Fork(pid, socket.socket(fileno=status), order.mark)
        for descriptor in (link, stderr):
            os.close(descriptor)
        with suppress(OSError):  # The controller has gone.
            child.status.send(NUMBER.pack(pid))
        self._ends[os.pidfd_open(pid)] = child

    def _tell_end(self, descriptor: int) -> None:
        child = self._ends.pop(descriptor)
        os.close(descriptor)
        end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with suppress(OSError):
            child.status.send(NUMBER.pack(code))
        self._ended[child.status.fileno()] = child

    def _become(self, order: Order, link: int, status: int, stderr: int) -> NoReturn:
        """In the fork: be a worker like one that was started from nothing."""
        try:
            os.setsid()
            self._link.close()
            for child in (*self._ends.values(), *self._ended.values()):
                child.status.close()
            for descriptor in (status, *self._ends):
                os.close(descriptor)
            for stream in (1, 2):
                os.dup2(stderr, stream)
            os.close(stderr)
            os.chdir(order.folder)
            _mark_this_process(order.mark)
            os.environ.clear()
            os.environ.update(order.environment)
            sys.argv = [process_worker.__file__, str(link), order.name]
            _show([sys.executable, "-P", "-m", process_worker.__name__, *sys.argv[1:], *["--user-code"] * order.runs_user_code])
            _draw_anew()
            _use_threads(order.environment.get(OMP))
            process_worker.serve_at(link, runs_user_code=order.runs_user_code)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _load(*modules: str) -> None:
    for module in modules:
        with suppress(Exception):  # The worker meets the same error, and tells it.
            importlib.import_module(module)


def _show(command: list[str]) -> None:
    """Write it over the command line that others see."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # Those from the third on.
    start, end = (int(fields[index - 3]) for index in (_ARG_START, _ARG_END))
    text = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _mark_this_process(mark: str) -> None:
    """In a fork: carry this mark in place of the last one, so that `kill_marked` finds it by its own.

    What others see of an environment is what a program was started with: the mark is written over that.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    start = getenv(MARK.encode())
    assert start is not None, "this process was not started with a mark"
    last = len(ctypes.string_at(start)) - len(mark)
    ctypes.memmove(start + last, mark.encode(), len(mark))


def _draw_anew() -> None:
    """Forks of one process must not draw the same numbers; `random` sees to itself."""
    if "numpy.random" in sys.modules:
        importlib.import_module("numpy.random").seed()


def _use_threads(wanted: str | None) -> None:
    """As OpenMP reads the variable, which it has done already."""
    if wanted is not None and wanted.isdecimal() and "torch" in sys.modules:
        importlib.import_module("torch").set_num_threads(max(1, int(wanted)))


if __name__ == "__main__":
    main()
