"""Two nodes of a Ray cluster on this machine, each in a network namespace of its own, and a link to disturb, for `chaos.py`.

Needs root, `ip` and `iptables`. All addresses live inside the namespaces, which are removed in the end.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
PORT = 6379
LINK = "link0"
LOSS = 0.2
"""Share of packets that a lossy link drops, in each direction."""
NARROW = ("rate", "1mbit", "burst", "16kb", "latency", "400ms")
LINK_S = (2.0, 6.0)
"""How long a link stays lossy, narrow or cut."""
LONG_CUT_S = 20.0
"""A cut that lasts until the other node is given up."""
NOTICE = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
"""When a node counts as lost: after some ten seconds."""
NO_OTHER_FAULTS = {"RAY_memory_monitor_refresh_ms": "0"}
"""Ray ends actors where the machine runs short of memory, also by what others take: here only what is drawn may go wrong."""
TROUBLES = ("lossy", "narrow", "cut", "cut for long")


class TwoNodes:
    """A Ray cluster: the head, where the controller runs, and another node."""

    def __init__(self, *, num_cpus_at_head: int, num_cpus_elsewhere: int) -> None:
        self._head, self._other = f"reroll-{os.getpid()}-a", f"reroll-{os.getpid()}-b"
        self._folder = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))  # Short: it holds sockets.
        self._num_cpus = num_cpus_at_head, num_cpus_elsewhere
        self.address = f"{HEAD}:{PORT}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        """Of all that joins the cluster."""

    def start(self) -> None:
        """Make the namespaces and the link, and start Ray on both sides."""
        for name in (self._head, self._other):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._head, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", self._other)
        for name, address in ((self._head, HEAD), (self._other, OTHER)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            _ip("-n", name, "link", "set", LINK, "up")
        self._ray(self._head, "--head", f"--port={PORT}", f"--node-ip-address={HEAD}", "--include-dashboard=false",
                  f"--temp-dir={self._folder}", f"--num-cpus={self._num_cpus[0]}")  # fmt: skip
        self.start_other()

    def start_other(self) -> None:
        """The second node, or another in its place."""
        self._ray(self._other, f"--address={self.address}", f"--node-ip-address={OTHER}", f"--num-cpus={self._num_cpus[1]}")

    def kill_other(self) -> None:
        """As a power cut would: every process of the second node."""
        self._kill(self._other)

    @property
    def has_other(self) -> bool:
        """Whether the second node's Ray is alive: it leaves when the head has given it up."""
        return any("raylet/raylet" in _command(pid).partition("\0")[0] for pid in self._pids(self._other))

    def actors(self) -> list[int]:
        """Ray's actors on the second node."""
        return [pid for pid in self._pids(self._other) if _command(pid).startswith("ray::_Actor")]

    def all_actors(self) -> list[int]:
        return [*self.actors(), *(pid for pid in self._pids(self._head) if _command(pid).startswith("ray::_Actor"))]

    def trouble(self, rng: random.Random, how: str) -> None:
        """Disturb the link for a while. A second node that was given up meanwhile is started anew."""
        seconds = LONG_CUT_S if how == "cut for long" else rng.uniform(*LINK_S)
        disturb, mend = {"lossy": (self._lose, self._lose_none), "narrow": (self._narrow, self._widen)}.get(
            how, (self._cut, self._join)
        )
        disturb()
        try:
            time.sleep(seconds)
        finally:
            mend()
        if how == "cut for long":
            deadline_s = time.monotonic() + 20
            while self.has_other and time.monotonic() < deadline_s:  # It hears only now that it was given up.
                time.sleep(0.2)
        if not self.has_other:
            self.start_other()

    def _lose(self) -> None:
        for name in (self._head, self._other):
            _in(name, "iptables", "-A", "INPUT", "-i", LINK, "-m", "statistic", "--mode", "random", "--probability", str(LOSS),
                "-j", "DROP")  # fmt: skip

    def _lose_none(self) -> None:
        for name in (self._head, self._other):
            _in(name, "iptables", "-F", "INPUT")

    def _narrow(self) -> None:
        for name in (self._head, self._other):
            _in(name, "tc", "qdisc", "add", "dev", LINK, "root", "tbf", *NARROW)

    def _widen(self) -> None:
        for name in (self._head, self._other):
            _in(name, "tc", "qdisc", "del", "dev", LINK, "root")

    def _cut(self) -> None:
        _ip("-n", self._head, "link", "set", LINK, "down")

    def _join(self) -> None:
        _ip("-n", self._head, "link", "set", LINK, "up")

    def command(self, *words: str) -> list[str]:
        """To run on the head's node."""
        return ["ip", "netns", "exec", self._head, *words]

    def at_head(self, make: Callable[[], T]) -> T:
        """What `make` gives, called in a thread that is on the head's node: its sockets are there."""
        made: list[T] = []

        def call() -> None:
            with open(f"/run/netns/{self._head}") as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(make())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return made[0]

    def close(self) -> None:
        """End all that runs in the namespaces, and remove them."""
        for name in (self._other, self._head):
            with suppress(subprocess.CalledProcessError):
                self._kill(name)
                _ip("netns", "del", name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ray(self, name: str, *words: str) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts"]  # The command may be of an environment below this one.
        environment = {**os.environ, **NOTICE, **NO_OTHER_FAULTS, **self.environment, "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", name, *ray, "start", "--disable-usage-stats", *words]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"ray start failed: {done.stdout}")

    def _pids(self, name: str) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", name).split()]

    def _kill(self, name: str) -> None:
        while pids := self._pids(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def why_not() -> str:
    """What keeps this process from making namespaces; empty if nothing does."""
    name = f"reroll-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        try:
            _in(name, "iptables", "-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP")
            _in(name, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *NARROW)
        finally:
            _ip("netns", "del", name)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd[:4])}: {error.stderr.strip()}"
    return ""


@contextmanager
def two_nodes(num_cpus_at_head: int, num_cpus_elsewhere: int = 8) -> Iterator[TwoNodes]:
    """While this is open, there are two."""
    nodes = TwoNodes(num_cpus_at_head=num_cpus_at_head, num_cpus_elsewhere=num_cpus_elsewhere)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _in(name: str, *words: str) -> None:
    _ip("netns", "exec", name, *words)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
