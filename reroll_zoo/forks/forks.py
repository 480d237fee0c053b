"""Workers that start in a moment: forks of a process that has already imported what they need (`server.py`).

Here is the controller's side. A controller has one such process for its own workers, and one for those that run user code:
it has not loaded torch, is small, and computes with one thread. Each is started when its first worker is to be forked, and
serves one environment: libraries read it when they are loaded.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from reroll.runtime.starts import Order
from reroll.runtime.subprocesses import kill_group, marked, sheltered_from_sigterm, with_one_thread

NUMBER = struct.Struct("!i")
"""What a server tells of a worker: its process number, then its exit code."""
_TITLE_ROOM = "-" * 100
"""As the server's last argument: place for a worker's own title, which is written over the server's."""
_FLEETING = frozenset({"PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TOKENIZERS_PARALLELISM"})
"""Variables that change while a process lives and that no library reads when it is imported: forks are told them."""
_MODULE = "reroll_zoo.forks.server"
_FOR_USER_CODE, _FOR_WORKERS = "user-code", "workers"
"""As what a server's command tells its kind."""
_LOADED_AHEAD = {
    _FOR_USER_CODE: ("reroll.rewards.worker", "reroll.envs.worker"),
    _FOR_WORKERS: ("reroll.training.cluster", "reroll.infer.worker"),
}
"""What nearly every run has forked of each kind: its modules."""
FORK, LOAD = b"fork", b"load"
"""What a server is told: to fork a worker by an order, or to load modules, so that a fork that is ordered later is quick."""


class Forked:
    """A worker that a server forks, as the controller sees it. Safe to use from several threads."""

    def __init__(self, status: socket.socket, server: ForkServer) -> None:
        """`status` tells its number, then its exit code; once it is closed, the worker is reaped."""
        self._status = status
        self._server = server  # Which lives as long as one of its workers, also when another has taken its place.
        self._changing = threading.Lock()
        self._is_to_end = False
        self.pid: int | None = None
        """Once it is known; it may be forked a little later."""
        self.returncode: int | None = None

    def kill(self) -> None:
        """It and its session, now or as soon as it is there. Harmless if it has ended."""
        with self._changing:
            self._is_to_end = True
            if self.pid is not None and self.returncode is None:
                _kill(self.pid)
        self._server.wake()  # Or nobody hears of its end.

    def wait(self) -> int:
        """Until it has ended; its session is ended then. Returns the exit code, or minus the signal."""
        pid = self._next_number()
        with self._changing:
            self.pid = pid
            if self._is_to_end and pid is not None:
                _kill(pid)
        code = self._next_number()
        with self._changing:
            if pid is not None:
                kill_group(pid)
            self.returncode = -signal.SIGKILL if code is None else code  # The server was killed, or could not fork.
            self._status.close()
        return self.returncode

    def _next_number(self) -> int | None:
        data = self._status.recv(NUMBER.size)
        return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None


class ForkServer:
    """The server as its controller sees it."""

    def __init__(self, *, runs_user_code: bool) -> None:
        self._owner = os.getpid()
        self._environment = _lasting(os.environ)
        environment = with_one_thread() if runs_user_code else dict(os.environ)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind = _FOR_USER_CODE if runs_user_code else _FOR_WORKERS
        command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), kind, _TITLE_ROOM]
        with theirs, sheltered_from_sigterm():
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # What workers print is no output of the run's.
                start_new_session=True,
                env=marked(uuid.uuid4().hex, environment | {"CUDA_VISIBLE_DEVICES": ""}),
            )

    @property
    def can_serve(self) -> bool:
        """Whether it lives, and is of this process and not of the one that this is a fork of."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def fits(self) -> bool:
        """Whether what libraries read when they are imported is still the same."""
        return self._environment == _lasting(os.environ)

    def fork(self, order: Order, link: socket.socket) -> Forked:
        """Have a worker forked that serves at `link`. Returns at once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "w") as nowhere:
            stderr = nowhere.fileno() if order.runs_user_code else 2
            self._send(FORK, order, link.fileno(), theirs.fileno(), stderr)
        return Forked(ours, self)

    def load(self, modules: Sequence[str]) -> None:
        """Have it load modules of ours. Returns at once."""
        self._send(LOAD, modules)

    def wake(self) -> None:
        """If a signal has stopped it, let it go on: nothing that it does can hang, so nobody looks whether it does."""
        self._process.send_signal(signal.SIGCONT)

    def _send(self, what: bytes, told: object, *descriptors: int) -> None:
        self.wake()
        with os.fdopen(os.memfd_create("order"), "wb") as file:  # An environment may be longer than a message.
            pickle.dump(told, file)
            file.flush()
            socket.send_fds(self._link, [what], [file.fileno(), *descriptors])


_servers: dict[bool, list[ForkServer]] = {}
"""Those whose forks run user code, and the others, the last that was used first. Two of each are kept: an environment that is
changed for a while is the old one again thereafter."""
_starting = threading.Lock()


def fork_if_possible(order: Order, link: socket.socket) -> Forked | None:
    """What `reroll.runtime.processes` asks: `fork`, or None where this system lacks what a server needs."""
    return fork(order, link) if can_fork() else None


def fork(order: Order, link: socket.socket) -> Forked:
    """Have a worker forked that serves at `link`, by a server of this process, which is started if need be."""
    kind = order.runs_user_code
    with _starting:
        others = [server for server in _servers.get(kind, []) if server.can_serve]
        for server in [server for server in others if server.fits]:
            others.remove(server)
            with suppress(OSError):  # It is being killed: the next one takes its place.
                forked = server.fork(order, link)
                _servers[kind] = [server, *others]
                return forked
        server = ForkServer(runs_user_code=kind)
        _servers[kind] = [server, *others[:1]]
        return server.fork(order, link)


def start_as_in(pid: int) -> None:
    """Start servers for this process of the kinds that another has now, with what their forks will need: for one that is to do
    the other's work."""
    commands = [words for child in children(pid) if _MODULE in (words := command(child))]
    for kind, modules in _LOADED_AHEAD.items():
        if any(kind in words for words in commands):
            server = ForkServer(runs_user_code=kind == _FOR_USER_CODE)
            server.load(modules)
            with _starting:
                _servers[kind == _FOR_USER_CODE] = [server]


def children(pid: int) -> list[int]:
    """The processes that this one has started, by whichever of its threads."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # A thread that has just ended.
            found += [int(child) for child in file.read_text().split()]
    return found


def command(pid: int) -> list[str]:
    """What it was started with; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


@functools.cache
def can_fork() -> bool:
    """Whether this system has what a server needs: Linux has."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("trial"))
    except (AttributeError, OSError):
        return False
    return os.path.exists("/proc/self/stat")


def _kill(pid: int) -> None:
    """It and its session; it alone if it was forked so lately that it leads none. Its number is its own until it is let go."""
    kill_group(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _FLEETING}
