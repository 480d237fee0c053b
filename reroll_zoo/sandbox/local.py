"""The local sandbox: a pool of warm interpreters at the best level that this machine gives."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from collections.abc import Sequence

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Program, Ran, Status
from reroll_zoo.sandbox.config import LocalSandboxConfig, SandboxLevel
from reroll_zoo.sandbox.cpp import Compiler
from reroll_zoo.sandbox.inside.wire import STARTED, Job, Result, pack_job
from reroll_zoo.sandbox.warm import START_TIMEOUT_S, InterpreterLost, WarmInterpreter

LEVELS: tuple[SandboxLevel, ...] = ("namespaces", "landlock", "rlimits")
"""From the strongest to the weakest."""
_GRACE_S = 10.0
"""How much longer than its wall time a program's answer may take before its interpreter counts as stuck."""
_FIXES = {
    "namespaces": "let your user make namespaces (see docs/security.md), start the container with --privileged, "
    "or set level: landlock, or kind: remote",
    "landlock": "use Linux 5.13 or later with Landlock in its list of security modules, or set level: rlimits, or kind: remote",
    "rlimits": "a local sandbox needs Linux with seccomp on x86_64 or aarch64: set kind: remote",
}
_STATUS: dict[str, Status] = {"wall": "timeout", "cpu": "timeout", "memory": "memory", "output": "output"}

_log = logging.getLogger(__name__)


class LocalPool:
    """Runs at most `num_processes` programs at a time, each in a fork of a warm interpreter. Others wait for their turn."""

    def __init__(self, config: LocalSandboxConfig, *, num_processes: int, preload: Sequence[str] = ()) -> None:
        self._config = config
        self._preload = tuple(preload)
        self.level, first, self.uid = _open_best(config)
        if preload:
            first.kill()  # It has shown what the machine gives. The next imports while nobody waits for it.
            first = WarmInterpreter(self.level, site_packages=config.site_packages, preload=preload)
        self.idle = [first]
        """Interpreters without a program."""
        self.interpreters = {first}
        self._channels: set[socket.socket] = set()
        self._places = asyncio.Semaphore(num_processes)
        self._closed = False
        self._compiler = Compiler(self._run)
        _announce(self.level, self.uid, asked=config.level)

    async def run(self, program: Program) -> Ran:
        stdin = program.stdin.encode(errors="replace")
        if program.language == "python":
            job = Job(source=program.source.encode(errors="replace"), stdin=stdin, limits=program.limits)
            return _as_ran(await self._run(job))
        if shutil.which("g++") is None:
            raise SandboxError("C++ programs need g++, which is not installed: apt-get install g++")
        build = await self._compiler.build(program.source)
        if not build.kept:
            return _as_ran(build)
        job = Job(command=("./main",), files={"main": build.kept}, stdin=stdin, limits=program.limits)
        return _as_ran(await self._run(job))

    async def close(self) -> None:
        self._closed = True
        await self._compiler.close()
        for channel in self._channels:
            channel.shutdown(socket.SHUT_RDWR)
        interpreters, self.interpreters, self.idle = self.interpreters, set(), []
        for interpreter in interpreters:
            interpreter.hang_up()
        await asyncio.gather(*(asyncio.to_thread(interpreter.end) for interpreter in interpreters))

    async def _run(self, job: Job) -> Result:
        """Run a job where there is a place for it. An interpreter that was lost is replaced, and the job tried once more."""
        async with self._places:
            try:
                return await self._try(job)
            except InterpreterLost:
                pass
            try:
                return await self._try(job)
            except InterpreterLost:
                raise SandboxError("two interpreters were lost over one program: is the machine out of memory?") from None

    async def _try(self, job: Job) -> Result:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        interpreter = self.idle.pop() if self.idle else self._start()
        try:
            with interpreter.begin() as channel:
                self._channels.add(channel)
                try:
                    result = interpreter.result(await _exchange(channel, job))
                finally:
                    self._channels.discard(channel)
        except (InterpreterLost, TimeoutError) as error:
            await self._discard(interpreter)
            if isinstance(error, TimeoutError):
                return Result(reason="wall", code=-9, wall_s=job.limits.wall_s, stdout=b"", stderr=b"", kept=b"")
            raise
        except BaseException:
            self._put_back(interpreter)
            raise
        self._put_back(interpreter)
        return result

    def _start(self) -> WarmInterpreter:
        interpreter = WarmInterpreter(self.level, site_packages=self._config.site_packages, preload=self._preload)
        self.interpreters.add(interpreter)
        return interpreter

    def _put_back(self, interpreter: WarmInterpreter) -> None:
        if not self._closed:
            self.idle.append(interpreter)

    async def _discard(self, interpreter: WarmInterpreter) -> None:
        if interpreter in self.interpreters:
            self.interpreters.discard(interpreter)
            await asyncio.to_thread(interpreter.kill)


async def _exchange(channel: socket.socket, job: Job) -> bytes:
    """Send a job and receive its result. Raises InterpreterLost if nobody takes it, TimeoutError if its end is long overdue."""
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    pieces = []
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await loop.sock_sendall(channel, pack_job(job))
            started = await loop.sock_recv(channel, len(STARTED))
    except (ConnectionError, TimeoutError):
        raise InterpreterLost from None
    if started != STARTED:
        raise InterpreterLost
    try:
        async with asyncio.timeout(job.limits.wall_s + _GRACE_S):
            while piece := await loop.sock_recv(channel, 1 << 16):
                pieces.append(piece)
    except ConnectionError:
        raise InterpreterLost from None
    return b"".join(pieces)


def _open_best(config: LocalSandboxConfig) -> tuple[SandboxLevel, WarmInterpreter, int]:
    """The level, an interpreter that has run its first program at it, and the user that it ran as."""
    levels = LEVELS if config.level == "auto" else (config.level,)
    reasons = []
    for level in levels:
        interpreter = WarmInterpreter(level, site_packages=config.site_packages)
        try:
            return level, interpreter, interpreter.probe()
        except SandboxError as error:
            interpreter.kill()
            reasons.append(f"no sandbox of level {level} on this machine ({error})")
    raise SandboxError(f"{'; '.join(reasons)}: {_FIXES[levels[-1]]}")


def _announce(level: SandboxLevel, uid: int, *, asked: str) -> None:
    if level == "rlimits":
        user = "root" if uid == 0 else f"user {uid}"
        _log.warning("sandbox level rlimits: no network and no child processes, but programs read files as %s", user)
    else:
        _log.info("sandbox level %s (asked: %s)", level, asked)


def _as_ran(result: Result) -> Ran:
    stderr = result.stderr.decode(errors="replace")
    status = _STATUS.get(result.reason, "error" if result.code else "ok")
    if status == "error" and _ran_out_of_memory(stderr):
        status = "memory"
    return Ran(
        status=status,
        stdout=result.stdout.decode(errors="replace"),
        stderr=stderr,
        exit_code=result.code,
        wall_s=result.wall_s,
    )


def _ran_out_of_memory(stderr: str) -> bool:
    """Whether a program's last words are those of one that was refused memory."""
    last = stderr.rstrip().rpartition("\n")[2]
    return last.startswith("MemoryError") or "std::bad_alloc" in last
