"""The supervisor of one program: starts it, feeds it, holds it to its limits, and reports how it ended."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import socket
import stat
import time
from contextlib import suppress
from typing import NoReturn

from reroll_zoo.sandbox.base import Limits
from reroll_zoo.sandbox.inside import kernel, usage
from reroll_zoo.sandbox.inside.jail import Jail, die_with_parent, set_limit
from reroll_zoo.sandbox.inside.wire import STARTED, Job, Result, pack_failure, pack_result, receive_job

_CHECK_EVERY_S = 0.1
_STDERR_KEPT = 16 * 1024
_STACK_MB = 64
_MAX_FILES_OPEN = 128
_MAX_SIGNALS_QUEUED = 128
"""And timers. The kernel counts them over all processes of a user."""
_F_ADD_SEALS, _F_SEAL_GROW, _F_SEAL_SEAL = 1033, 4, 1


def supervise(channel: socket.socket, jail: Jail) -> Job:
    """Take a job from the channel and run it. Returns in the program's process alone; the supervisor ends with its report."""
    try:
        job = receive_job(channel)
        channel.sendall(STARTED)
        jail.furnish(job)
        for name, content in job.files.items():
            with open(name, "wb", opener=lambda path, flags: os.open(path, flags, 0o700)) as file:
                file.write(content)
        kernel.call("prctl", kernel.PR_SET_DUMPABLE, 0, 0, 0, 0)  # The program may not look into this process.
        return _start(job, channel, jail)
    except OSError as error:
        channel.sendall(pack_failure(str(error)))
    except EOFError:
        pass
    os._exit(0)


def _start(job: Job, channel: socket.socket, jail: Jail) -> Job:
    stdin = _as_file(job.stdin)
    out_read, out_write = os.pipe()
    error_read, error_write = os.pipe()
    ready_read, ready_write = os.pipe()
    wake = _wake_on_child()
    watch = _Watch([out_read, error_read], wake, channel, job=job, jail=jail)
    child = os.fork()
    if child == 0:
        try:
            _take_over([stdin, out_write, error_write], job.limits)
            jail.lock(job)
        except OSError as error:
            os.write(2, f"the sandbox could not lock a program in: {error}\n".encode())
            os._exit(1)
        return job
    for descriptor in (stdin, out_write, error_write, ready_write):
        os.close(descriptor)
    os.read(ready_read, 1)  # Until the child has taken over: before that it cannot be looked into.
    started_s = time.monotonic()
    reason, code = watch.until_end(child, started_s=started_s)
    wall_s = time.monotonic() - started_s
    jail.end(child)
    kept = _read_kept(job) if (reason, code) == ("exit", 0) and job.keep else b""
    if reason == "threads":
        watch.output[1] += f"\nmore than {job.limits.processes} processes and threads\n".encode()
    stdout, stderr = (bytes(stream) for stream in watch.output)
    result = Result(reason=reason, code=code, wall_s=wall_s, stdout=stdout, stderr=stderr, kept=kept)
    return _report(channel, result)


def _take_over(streams: list[int], limits: Limits) -> None:
    """Make this the program's process: its streams and no other descriptor, a session of its own, its limits."""
    signal.set_wakeup_fd(-1)
    die_with_parent()
    os.setsid()
    kernel.call("prctl", kernel.PR_SET_DUMPABLE, 1, 0, 0, 0)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # The supervisor sees this: from here on it watches.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_limit("RLIMIT_CPU", math.ceil(limits.cpu_s) + 1)
    set_limit("RLIMIT_AS", limits.memory_mb * 2**20)
    set_limit("RLIMIT_STACK", min(limits.memory_mb, _STACK_MB) * 2**20)
    set_limit("RLIMIT_FSIZE", limits.file_mb * 2**20)
    set_limit("RLIMIT_NOFILE", _MAX_FILES_OPEN)
    set_limit("RLIMIT_SIGPENDING", _MAX_SIGNALS_QUEUED)
    set_limit("RLIMIT_MEMLOCK", 0)
    set_limit("RLIMIT_CORE", 0)


class _Watch:
    """Reads what a program writes and looks after its limits until it ends or must be ended."""

    def __init__(self, streams: list[int], wake: int, channel: socket.socket, *, job: Job, jail: Jail) -> None:
        self._streams = streams
        self._wake = wake
        self._channel = channel
        self._limits = job.limits
        self._max_output = job.limits.output_kb * 1024
        self._room_bytes = job.room_bytes
        self._jail = jail
        self._child = 0
        self._deadline_s = self._next_check_s = math.inf
        self._group_cpu_s_before = self._group_cpu_s()
        self._buried_cpu_s = 0.0
        self._num_written = [0, 0]
        self.output = [bytearray(), bytearray()]
        self._poll = select.poll()
        for descriptor in [*streams, wake, channel.fileno()]:
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    def until_end(self, child: int, *, started_s: float) -> tuple[str, int]:
        """Why the program ended, and its exit code."""
        self._child = child
        self._deadline_s = started_s + self._limits.wall_s
        self._next_check_s = started_s + _CHECK_EVERY_S
        while True:
            if not self._wait():
                return self._stop("gone")
            if max(self._num_written) > self._max_output:
                return self._stop("output")
            if (ended := self._reap()) is not None:
                return ended
            now_s = time.monotonic()
            if now_s >= self._deadline_s:
                return self._stop("wall")
            if now_s >= self._next_check_s:
                self._next_check_s = now_s + _CHECK_EVERY_S
                if reason := self._excess():
                    return self._stop(reason)

    def _stop(self, reason: str) -> tuple[str, int]:
        os.kill(self._child, signal.SIGKILL)
        return reason, -signal.SIGKILL

    def _wait(self) -> bool:
        """Wait for something to happen. False: nobody waits for the result any more."""
        timeout_s = max(0.0, min(self._deadline_s, self._next_check_s) - time.monotonic())
        for descriptor, _ in self._poll.poll(math.ceil(timeout_s * 1000)):
            if descriptor == self._channel.fileno():
                return False
            if descriptor == self._wake:
                os.read(self._wake, 4096)
            elif not self._read(self._streams.index(descriptor)):
                self._poll.unregister(descriptor)  # Closed: it would be ready for ever.
        return True

    def _read(self, index: int) -> bool:
        """Take what there is to read: the start of standard output, the end of standard error. False: there is nothing."""
        try:
            data = os.read(self._streams[index], 1 << 16)
        except BlockingIOError:
            return False
        self._num_written[index] += len(data)
        self.output[index] += data
        del self.output[0][self._max_output :]
        del self.output[1][:-_STDERR_KEPT]
        return bool(data)

    def _reap(self) -> tuple[str, int] | None:
        """How the program ended, if it did. Also buries what it left to die: orphans come to the supervisor."""
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return None
            if pid == self._child:
                break
            self._buried_cpu_s += used.ru_utime + used.ru_stime
        for index in (0, 1):
            while self._num_written[index] <= self._max_output and self._read(index):
                pass
        self._child = 0  # Its number may be another's from now on.
        code = os.waitstatus_to_exitcode(status)
        if max(self._num_written) > self._max_output or self._fills_disk():
            return "output", code
        if code < 0 and used.ru_utime + used.ru_stime >= self._limits.cpu_s:
            return "cpu", code
        return "exit", code

    def _excess(self) -> str:
        """The limit that the program's processes are over together, or nothing."""
        cpu_s, memory_mb, threads = self._buried_cpu_s, 0.0, 0
        for pid in self._jail.pids(self._child):
            with suppress(FileNotFoundError, ProcessLookupError):  # It has ended since.
                cpu_s += usage.cpu_s(pid)
                memory_mb += usage.memory_mb(pid)
                threads += usage.num_threads(pid)
        if max(cpu_s, self._group_cpu_s() - self._group_cpu_s_before) > self._limits.cpu_s:
            return "cpu"
        if memory_mb > self._limits.memory_mb:
            return "memory"
        if threads > self._limits.processes:  # Where the kernel cannot count them for this program alone.
            return "threads"
        return "output" if self._fills_disk() else ""

    def _group_cpu_s(self) -> float:
        """CPU time of all in the group but this process. Those that wait for it use none."""
        return self._jail.group.cpu_s() - time.process_time()

    def _fills_disk(self) -> bool:
        return self._jail.written_bytes(self._child, largest_bytes=self._limits.file_mb * 2**20) > self._room_bytes


def _wake_on_child() -> int:
    """The end of a pipe that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return read


def _read_kept(job: Job) -> bytes:
    """The file that the job asks for, if the command left a plain one of a size that it may have."""
    try:
        descriptor = os.open(job.keep, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(job.limits.file_mb * 2**20) if plain else b""


def _report(channel: socket.socket, result: Result) -> NoReturn:
    channel.setblocking(True)
    with suppress(OSError):  # Nobody may wait for it any more.
        channel.sendall(pack_result(result))
    os._exit(0)


def _as_file(data: bytes) -> int:
    """Data as an open file in memory that can be read and cannot grow."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write_all(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, _F_ADD_SEALS, _F_SEAL_GROW | _F_SEAL_SEAL)
    return file


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
