"""C++ sources to binaries, compiled inside the sandbox and kept while there is room."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Limits
from reroll_zoo.sandbox.inside.wire import Job, Result

_COMMAND = ("g++", "-O1", "-std=gnu++17", "-x", "c++", "-", "-o", "main")
_LIMITS = Limits(cpu_s=20, wall_s=40, memory_mb=1536, file_mb=32)
_MAX_KEPT_BYTES = 64 * 2**20


class Compiler:
    """Compiles each source once, however many programs ask for it at a time. What was asked for last stays longest."""

    def __init__(self, run: Callable[[Job], Awaitable[Result]]) -> None:
        self._run = run
        self._builds: OrderedDict[bytes, asyncio.Task[Result]] = OrderedDict()

    async def build(self, source: str) -> Result:
        """The compiler's result; `kept` is the binary, empty if the source does not compile."""
        text = source.encode(errors="replace")
        key = hashlib.sha256(text).digest()
        if key not in self._builds:
            job = Job(command=_COMMAND, stdin=text, keep="main", limits=_LIMITS, trusted=True)
            self._builds[key] = asyncio.create_task(self._wait_for(job))
        self._builds.move_to_end(key)
        build = self._builds[key]
        try:
            return await asyncio.shield(build)  # Others may wait for it when this caller is cancelled.
        except BaseException:
            if build.cancelled():
                raise SandboxError("the sandbox is closed") from None
            if build.done():
                self._builds.pop(key, None)
            raise
        finally:
            self._make_room()

    async def close(self) -> None:
        """End the compilers that still run."""
        builds = list(self._builds.values())
        self._builds.clear()
        for build in builds:
            build.cancel()
        await asyncio.gather(*builds, return_exceptions=True)

    async def _wait_for(self, job: Job) -> Result:
        return await self._run(job)

    def _make_room(self) -> None:
        """Forget the oldest finished builds until the rest fits."""
        done = [key for key, build in self._builds.items() if build.done() and not build.cancelled() and not build.exception()]
        room = _MAX_KEPT_BYTES
        for key in reversed(done):
            room -= len(self._builds[key].result().kept)
            if room < 0:
                del self._builds[key]
