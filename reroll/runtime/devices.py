"""Who runs on which device, and who holds it now. Pure logic: no torch, no device is touched."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

Ranks = tuple[int, ...]
Hook = Callable[[Ranks], Awaitable[None]]
"""Moves these workers of a role onto their devices, or off them."""


def num_usable_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class _Ask:
    """A role's place in the queue for its devices."""

    role: str
    granted: asyncio.Event


class DeviceMap:
    """Which worker of which role is on which devices, and the leases by which roles that share a GPU take turns.

    Leases are granted in the order of asking among roles that overlap; roles on other GPUs are not held up. The CPU is
    shared: a role that has no GPU never waits.

    Beside the lease there is residence. A lease brings all workers of its role onto their devices and sends away the
    workers of other roles that are there; who is resident stays so after its lease, until another role comes. At first all
    are, since workers are built on their devices. Workers of a role in `independent` are sent away one by one: an engine on
    GPUs 0-7 goes on with workers 4-7 while a trainer holds 0-3, and grows back when it leases its devices again. The workers
    of any other role leave together, because they work together.
    """

    def __init__(self, roles: Mapping[str, Sequence[str | Collection[str]]], *, independent: Collection[str] = ()) -> None:
        """`roles`: the device of every worker by rank, or the several devices that one worker spans."""
        self._devices_of_workers = {role: tuple(map(_gpus, devices)) for role, devices in roles.items()}
        self._independent = frozenset(independent)
        self._queue: deque[_Ask] = deque()
        self._active: list[str] = []
        self._resident = {role: set(range(len(devices))) for role, devices in roles.items()}
        self._moving = asyncio.Lock()
        self._swap_s = 0.0
        self._on_enter: dict[str, Hook] = {}
        self._on_leave: dict[str, Hook] = {}

    def set_hooks(self, role: str, *, on_enter: Hook, on_leave: Hook) -> None:
        """What moves workers of a role onto their devices and off them, e.g. an engine's wake and sleep.

        They run only for workers whose device changes hands: one that comes back to a device nobody used in between finds
        everything where it left it.
        """
        self._on_enter[role] = on_enter
        self._on_leave[role] = on_leave

    def devices(self, role: str) -> frozenset[str]:
        """The GPUs of all its workers."""
        return frozenset[str]().union(*self._devices_of_workers[role])

    def take_swap_s(self) -> float:
        """Seconds in which workers moved onto their devices and off them, since this was last asked."""
        seconds, self._swap_s = self._swap_s, 0.0
        return seconds

    def overlap(self, role: str, other: str) -> bool:
        """Whether two roles share a GPU."""
        return bool(self.devices(role) & self.devices(other))

    def evicted(self, role: str, *, by: str) -> Ranks:
        """The workers of a role that must leave their devices when another one takes its own."""
        taken = self.devices(by)
        workers = self._devices_of_workers[role]
        ranks = tuple(rank for rank, devices in enumerate(workers) if devices & taken)
        return tuple(range(len(workers))) if ranks and role not in self._independent else ranks

    @asynccontextmanager
    async def lease(self, role: str) -> AsyncIterator[None]:
        """Hold the role's devices, with all its workers there. Not re-entrant: a role that asks twice waits for itself."""
        if not self.devices(role):
            yield
            return
        ask = _Ask(role, asyncio.Event())
        self._queue.append(ask)
        self._grant()
        try:
            await ask.granted.wait()
            async with self._moving:
                clock = asyncio.get_running_loop().time  # So that a simulated loop measures simulated time.
                started_s = clock()
                await self._move_in(role)
                self._swap_s += clock() - started_s
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
        for other in self._devices_of_workers:
            leaving = tuple(rank for rank in self.evicted(other, by=role) if rank in self._resident[other])
            if other != role and leaving:
                if other in self._on_leave:
                    await self._on_leave[other](leaving)
                self._resident[other].difference_update(leaving)
        missing = tuple(rank for rank in range(len(self._devices_of_workers[role])) if rank not in self._resident[role])
        if missing and role in self._on_enter:
            await self._on_enter[role](missing)
        self._resident[role].update(missing)


def _gpus(devices: str | Collection[str]) -> frozenset[str]:
    """The GPUs among a worker's devices; the CPU is none."""
    return frozenset([devices] if isinstance(devices, str) else devices) - {"cpu"}
