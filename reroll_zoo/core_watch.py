"""Whether this process gets the cores that it asks for, and how its threads wait when it does not.

Threads that share an operation wait for each other thousands of times a second. GNU OpenMP, which PyTorch's Linux wheels
bring, spins for milliseconds while it waits. On an idle machine that is the fastest way; beside other work the spinning takes
the very core that the awaited thread needs, and a step took 10 to 50 times as long. How long a thread spins changes no
result, unlike the number of threads, so it may follow the load in the middle of a run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from reroll.runtime.cpu import OMP_PAUSE_HARD, TORCH, gnu_openmp
from reroll.runtime.devices import num_usable_cores

_THREADS = "/proc/self/task"
LOOK_EVERY_S = 0.5
CROWDED = 0.1
"""The share of its time that a thread may wait for a core before the machine counts as crowded."""
ROOMY = 0.05
"""The share below which it no longer does."""
NUM_ROOMY_LOOKS = 4
"""How many looks in a row must say so: spinning again too early costs far more than too late."""
WORTH_TELLING = 0.25
_MIN_ACTIVE = 0.1
"""A thread that wanted a core for less than this share of the time tells nothing."""


_MIN_OTHERS = 0.2
"""Cores that others must use before a wait is laid to them: on an idle machine our own threads get into each other's way."""


class Use(NamedTuple):
    """What a thread did since it began, in nanoseconds, as the kernel counts it."""

    ran_ns: int
    waited_ns: int
    """Ready to run, and without a core."""


def thread_uses() -> dict[str, Use]:
    """By thread of this process. There are many, and after each call of the kernel Python's lock is taken again: three calls
    for each thread, where `pathlib` makes ten."""
    uses = {}
    for thread in os.listdir(_THREADS):
        try:
            file = os.open(f"{_THREADS}/{thread}/schedstat", os.O_RDONLY)
            try:
                ran, waited, *_ = os.read(file, 128).split()
            finally:
                os.close(file)
        except (OSError, ValueError):  # The thread has ended, or nothing is counted.
            continue
        uses[thread] = Use(int(ran), int(waited))
    return uses


def longest_wait(before: Mapping[str, Use], after: Mapping[str, Use], *, seconds: float) -> float | None:
    """The share of its time that the worst-off thread waited for a core. One that waits holds up all it works with.

    None where no thread wanted one: a process that idles cannot tell how crowded the machine is.
    """
    shares = []
    for thread, now in after.items():
        then = before.get(thread, Use(0, 0))
        ran, waited = now.ran_ns - then.ran_ns, now.waited_ns - then.waited_ns
        if ran + waited > _MIN_ACTIVE * seconds * 1e9:
            shares.append(waited / (ran + waited))
    return max(shares, default=None)


class Look(NamedTuple):
    """What a look finds."""

    at_s: float
    uses: dict[str, Use]
    own_s: float
    """CPU time of this process."""
    machine_s: float
    """CPU time of the whole machine."""

    @classmethod
    def now(cls) -> Look:
        return cls(time.monotonic(), thread_uses(), time.process_time(), machine_cpu_s())


def machine_cpu_s() -> float:
    """CPU time that all programs and the kernel have used since the start, waiting for disks not counted."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def wait_for_others(before: Look, after: Look) -> float | None:
    """The share of its time that our worst-off thread waited for a core because others used it; None: we wanted none."""
    seconds = after.at_s - before.at_s
    others_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    if others_s < _MIN_OTHERS * seconds:
        return 0.0
    return longest_wait(before.uses, after.uses, seconds=seconds)


class ThreadWatch:
    """Looks, twice a second, whether threads of this process wait for a core that others use, and has OpenMP's helpers sleep
    while they do. Where there is no /proc it never finds that they do.

    A daemon thread does both: the helpers that act as brake must be its own.
    """

    def __init__(self) -> None:
        self._crowding = Crowding()
        self._lock = threading.Lock()
        self._waits: list[float] = []
        if Path("/proc/self/schedstat").exists():
            threading.Thread(target=self._run, name="core watch", daemon=True).start()

    @property
    def is_crowded(self) -> bool:
        """Whether the machine has less room than work."""
        return self._crowding.is_on

    def take_wait(self) -> float:
        """The share of its time that the worst-off thread waited for others' cores, on average since the last call."""
        with self._lock:
            waits, self._waits = self._waits, []
        return sum(waits) / len(waits) if waits else 0.0

    def remark(self, wait: float) -> str:
        """What to tell the user when threads waited this share of their time for a core; empty if that is little."""
        if wait < WORTH_TELLING:
            return ""
        load = f"load {os.getloadavg()[0]:.0f} on {num_usable_cores()} cores, " if hasattr(os, "getloadavg") else ""
        return f"the machine is busy: {load}{wait:.0%} of the time was spent waiting for one"

    def _run(self) -> None:
        brake, look = Brake(), Look.now()
        while True:
            time.sleep(LOOK_EVERY_S)
            before, look = look, Look.now()
            wait = wait_for_others(before, look)
            if wait is not None:
                with self._lock:
                    self._waits.append(wait)
            self._crowding.see(wait)
            brake.set(self._crowding.is_on)


class Crowding:
    """Whether the machine counts as crowded, by the waits that one look after the other finds."""

    def __init__(self) -> None:
        self.is_on = False
        self._num_roomy = 0

    def see(self, wait: float | None) -> None:
        """One look more. While we want no core nothing is known, and what was so counts as so: else each step after a pause
        would find its helpers spinning again, beside those who were there all the time."""
        if wait is None:
            return
        self._num_roomy = self._num_roomy + 1 if wait < ROOMY else 0
        if wait > CROWDED:
            self.is_on = True
        elif self._num_roomy >= NUM_ROOMY_LOOKS:
            self.is_on = False


class Helpers:
    """Helper threads of GNU OpenMP that belong to the calling thread, and do nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def hire(cls, num: int) -> Helpers | None:
        """So many, for the calling thread. None if this process has no GNU OpenMP, or not yet."""
        library = gnu_openmp() if TORCH in sys.modules else None
        if library is None:
            return None
        run: Callable[[object, None, int, int], None] = library.GOMP_parallel
        # Any harmless function will do: the helpers stay when it has returned.
        run(library.omp_get_thread_num, None, num + 1, 0)
        return cls(library)

    def dismiss(self) -> None:
        """From the thread that hired them."""
        self._library.omp_pause_resource_all(OMP_PAUSE_HARD)


class Brake:
    """Idle helpers of one thread, more than there are cores.

    GNU OpenMP counts all helpers of a process. While they outnumber the cores it spins for microseconds instead of
    milliseconds, in every thread. It reads the count before each wait, so the change holds at once. `set` must always be
    called from the same thread.
    """

    def __init__(self) -> None:
        self._helpers: Helpers | None = None

    def set(self, is_on: bool) -> None:
        """Pull or loose it. Without GNU OpenMP in this process there is nothing to do."""
        if is_on and self._helpers is None:
            self._helpers = Helpers.hire(num_usable_cores())
        elif not is_on and self._helpers is not None:
            self._helpers.dismiss()
            self._helpers = None


@functools.cache
def core_watch() -> ThreadWatch:
    """The watch of this process, started by whoever asks first."""
    return ThreadWatch()
