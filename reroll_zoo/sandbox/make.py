"""From a config to a sandbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from reroll.errors import SandboxError
from reroll.runtime.devices import num_usable_cores
from reroll_zoo.sandbox.base import Program, Ran, Sandbox
from reroll_zoo.sandbox.config import LocalSandboxConfig, SandboxConfig
from reroll_zoo.sandbox.local import LocalPool


def open_sandbox(config: SandboxConfig, *, num_processes: int, preload: Sequence[str] = ()) -> Sandbox:
    """A sandbox that runs up to `num_processes` programs at a time here, or as many as its config says elsewhere.

    Programs that run here find the modules of `preload` imported. Raises SandboxError with the fix if the level asked for
    is not to be had.
    """
    if isinstance(config, LocalSandboxConfig):
        return LocalPool(config, num_processes=num_processes, preload=preload)
    try:
        from reroll_zoo.sandbox.remote import RemoteClient
    except ModuleNotFoundError as error:
        raise SandboxError(f"a remote sandbox needs a package: {error}; pip install 'reroll[agents]'") from error
    return RemoteClient(config)


def join_sandbox(config: SandboxConfig) -> Sandbox:
    """One for all of this event loop whose programs run in the same way. It closes when the last of them closes theirs."""
    key = (asyncio.get_running_loop(), config)
    if key not in _shared:
        _shared[key] = open_sandbox(config, num_processes=num_usable_cores())
    return _Joined(key)


_Key = tuple[asyncio.AbstractEventLoop, SandboxConfig]
_shared: dict[_Key, Sandbox] = {}
_num_joined: Counter[_Key] = Counter()


class _Joined:
    """One holder's part of a sandbox that is shared."""

    def __init__(self, key: _Key) -> None:
        self._key, self._sandbox = key, _shared[key]
        self._is_closed = False
        _num_joined[key] += 1

    @property
    def level(self) -> str:
        return self._sandbox.level

    async def run(self, program: Program) -> Ran:
        return await self._sandbox.run(program)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        _num_joined[self._key] -= 1
        if not _num_joined[self._key]:
            del _num_joined[self._key], _shared[self._key]
            await self._sandbox.close()
