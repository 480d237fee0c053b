"""A sandbox for callers that are not async: environments and their tools, and rewards in their processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

from reroll.errors import SandboxError
from reroll.runtime.devices import num_usable_cores
from reroll_zoo.sandbox.base import Program, Ran
from reroll_zoo.sandbox.config import SandboxConfig
from reroll_zoo.sandbox.make import open_sandbox


class BlockingSandbox:
    """Runs programs for any number of threads, each of which waits for its own. Raises SandboxError as `open_sandbox` does."""

    def __init__(self, config: SandboxConfig, *, preload: Sequence[str] = ()) -> None:
        # Opened here, where its error belongs; all that it awaits it awaits on the loop.
        self._sandbox = open_sandbox(config, num_processes=num_usable_cores(), preload=preload)
        self.level = self._sandbox.level
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
        self._thread.start()

    def run(self, program: Program) -> Ran:
        """Run the program to its end."""
        if self._loop.is_closed():
            raise SandboxError("the sandbox is closed")
        try:
            return asyncio.run_coroutine_threadsafe(self._sandbox.run(program), self._loop).result()
        except CancelledError:
            raise SandboxError("the sandbox was closed while the program ran") from None

    def close(self) -> None:
        """End every program and leave nothing behind. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._sandbox.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def shared_sandbox(config: SandboxConfig, preload: tuple[str, ...] = ()) -> BlockingSandbox:
    """One for all of this process that run programs in the same way. It lives as long as the process, and leaves nothing."""
    with _lock:
        if (config, preload) not in _shared:
            _shared[config, preload] = BlockingSandbox(config, preload=preload)
        return _shared[config, preload]


_shared: dict[tuple[SandboxConfig, tuple[str, ...]], BlockingSandbox] = {}
_lock = threading.Lock()
