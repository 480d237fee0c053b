"""What a sandbox holds back, found out by trying: programs that do what they should not, within reason."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from reroll_zoo.sandbox.base import Limits, Program, Ran, Sandbox, Status

_EVERYWHERE = ("namespaces", "landlock", "rlimits")
_LIMITS = Limits(cpu_s=1, wall_s=60, memory_mb=256, processes=8, file_mb=4, output_kb=64)
"""Wall time that only a check of wall time uses up, however busy the machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """Something that a program tries. It is held back if that raises OSError, or if the program ends with the status `ends`."""

    name: str
    source: str
    """`FILE` is a file of ours, `PID` a process, `SOCKET` the address of a local socket."""
    levels: Sequence[str] = _EVERYWHERE
    """Where it must be held back."""
    ends: Status | None = None
    wall_s: float = _LIMITS.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a check."""

    name: str
    held: bool
    promised: bool

    @property
    def broken(self) -> bool:
        return self.promised and not self.held


_SIGNAL_BY_DESCRIPTOR = """
import fcntl, os
read, write = os.pipe()
fcntl.fcntl(read, 8, PID)
fcntl.fcntl(read, 10, 9)
fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK | 0o20000)
os.write(write, b'x')
"""
_DATAGRAM = """
import socket
end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
end.sendto(b'x', SOCKET)
"""
_WATCH = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.inotify_add_watch(libc.inotify_init1(0), os.path.dirname(FILE).encode(), 0x100) < 0: raise OSError
"""
_DELETED_FILES = """
import os, time
kept = []
for _ in range(20):
    kept.append(os.open('big', os.O_RDWR | os.O_CREAT))
    os.unlink('big')
    os.write(kept[-1], bytes(2**20))
time.sleep(600)
"""
_MEMORY_IN_OTHER_THREADS = """
import ctypes, os, threading, time
def hoard():
    time.sleep(0.5)  # By then the first thread is gone.
    kept = b'x' * (100 * 2**20)
    time.sleep(600)
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=hoard).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(600)
"""
_FORGOTTEN_CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(100):
    read, write = os.pipe()
    if os.fork() == 0:
        while time.process_time() < 0.03: pass
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
"""
_THREADS = """
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(600)
"""

CHECKS = (
    Escape(name="read a file of yours", source="open(FILE).read()", levels=("namespaces", "landlock")),
    Escape(name="ask for the size of a file of yours", source="import os; os.stat(FILE)", levels=("namespaces",)),
    Escape(name="watch a folder of yours", source=_WATCH),
    Escape(name="write to a file of yours", source="open(FILE, 'a').write('x')"),
    Escape(name="make a file in the system's folders", source="open('/usr/lib/reroll-was-here', 'w')"),
    Escape(
        name="read the environment of your process",
        source="open(f'/proc/{PID}/environ').read()",
        levels=("namespaces", "landlock"),
    ),
    Escape(name="signal your process", source="import os; os.kill(PID, 0)"),
    Escape(name="signal your process by a descriptor", source=_SIGNAL_BY_DESCRIPTOR),
    Escape(name="open a network socket", source="import socket; socket.socket()"),
    Escape(name="open a local socket", source="import socket; socket.socket(socket.AF_UNIX)"),
    Escape(name="send a datagram to a socket of yours", source=_DATAGRAM),
    Escape(
        name="start 100 processes",
        source="import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(600); os._exit(0)",
    ),
    Escape(name="start 100 threads", source=_THREADS, ends="error"),
    Escape(name="write 100 MB to disk", source="for i in range(100): open(f'big{i}', 'wb').write(bytes(2**20))", ends="output"),
    Escape(name="keep deleted files on disk", source=_DELETED_FILES, ends="output"),
    Escape(name="use 1 GB of memory", source="bytearray(2**30)", ends="memory"),
    Escape(name="share memory that nobody counts", source="import mmap; mmap.mmap(-1, 2**20)"),
    Escape(name="use memory where the first thread is gone", source=_MEMORY_IN_OTHER_THREADS, ends="memory"),
    Escape(name="compute for longer than allowed", source="while True: pass", ends="timeout"),
    # Only a control group counts these, and not every machine lets us make one.
    Escape(name="compute in forgotten children", source=_FORGOTTEN_CHILDREN, ends="timeout", levels=("landlock", "rlimits")),
    Escape(name="sleep for longer than allowed", source="import time; time.sleep(600)", ends="timeout", wall_s=1),
    Escape(name="write without end", source="while True: print('x' * 1000)", ends="output"),
)


async def try_out(sandbox: Sandbox) -> list[Finding]:
    """Run every check in a sandbox of this machine."""
    findings = []
    with _targets() as names:
        for check in CHECKS:
            program = Program(source=f"{names}\n{_attempt(check)}", limits=replace(_LIMITS, wall_s=check.wall_s))
            held = _held(check, await sandbox.run(program))
            findings.append(Finding(name=check.name, held=held, promised=sandbox.level in check.levels))
    return findings


@contextmanager
def _targets() -> Iterator[str]:
    """Things of ours that the programs aim at, made for that, and the lines that name them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        subprocess.Popen(["sleep", "600"]) as process,
    ):
        file = Path(folder) / "file"
        file.write_text("yours")
        file.chmod(0o666)
        Path(folder).chmod(0o755)
        listener.bind("")  # The kernel finds an abstract name for it.
        try:
            yield f"FILE, PID, SOCKET = {str(file)!r}, {process.pid}, {listener.getsockname()!r}"
        finally:
            process.kill()


def _attempt(check: Escape) -> str:
    body = "".join(f"    {line}\n" for line in check.source.strip().splitlines())
    return f"try:\n{body}except OSError: print('held')\n"


def _held(check: Escape, ran: Ran) -> bool:
    return ran.status == check.ends or ran.stdout == "held\n"
