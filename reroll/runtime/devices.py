"""Who runs on which device, and who holds it now. Pure logic: no torch, no device is touched."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

Hook = Callable[[], Awaitable[None]]


def num_usable_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class _Ask:
    """A role's place in the queue for its devices."""

    role: str
    granted: asyncio.Event


class DeviceMap:
    """Which role is on which devices, and the leases by which roles that share a GPU take turns.

    Leases are granted in the order of asking among roles that overlap; roles on other GPUs are not held up. The CPU is
    shared: a role that has no GPU never waits. `on_enter` and `on_leave` of a role run only when a device changes hands,
    so a role that comes back to devices nobody used in between finds everything where it left it.
    """

    def __init__(self, roles: Mapping[str, tuple[str, ...]]) -> None:
        self._devices = {role: frozenset(devices) - {"cpu"} for role, devices in roles.items()}
        self._queue: deque[_Ask] = deque()
        self._active: list[str] = []
        self._resident: set[str] = set()
        self._on_enter: dict[str, Hook] = {}
        self._on_leave: dict[str, Hook] = {}

    def set_hooks(self, role: str, *, on_enter: Hook, on_leave: Hook) -> None:
        """What moves a role onto its devices and off them, e.g. an engine's wake and sleep."""
        self._on_enter[role] = on_enter
        self._on_leave[role] = on_leave

    def overlap(self, role: str, other: str) -> bool:
        """Whether two roles share a GPU."""
        return bool(self._devices[role] & self._devices[other])

    @asynccontextmanager
    async def lease(self, role: str) -> AsyncIterator[None]:
        """Hold the role's devices. Not re-entrant: a role that asks twice waits for itself."""
        if not self._devices[role]:
            yield
            return
        ask = _Ask(role, asyncio.Event())
        self._queue.append(ask)
        self._grant()
        try:
            await ask.granted.wait()
            await self._move_in(role)
            yield
        finally:
            if ask.granted.is_set():
                self._active.remove(role)
            else:
                self._queue.remove(ask)
            self._grant()

    def _grant(self) -> None:
        """Wake every ask that overlaps neither a held lease nor an earlier ask."""
        waiting: deque[_Ask] = deque()
        for ask in self._queue:
            ahead = [*self._active, *(earlier.role for earlier in waiting)]
            if any(self.overlap(ask.role, role) for role in ahead):
                waiting.append(ask)
            else:
                self._active.append(ask.role)
                ask.granted.set()
        self._queue = waiting

    async def _move_in(self, role: str) -> None:
        if role in self._resident:
            return
        for other in [other for other in self._resident if self.overlap(role, other)]:
            if other in self._on_leave:
                await self._on_leave[other]()
            self._resident.remove(other)
        if role in self._on_enter:
            await self._on_enter[role]()
        self._resident.add(role)
