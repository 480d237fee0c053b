"""What a process that computes on the CPU asks of the C library, of OpenMP (nothing elsewhere) and of the garbage collector."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from reroll.config.registry import load_entry
from reroll.runtime.devices import num_usable_cores

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8

OMP = "OMP_NUM_THREADS"
"""The variable that says how many threads torch starts with."""
OMP_PAUSE_HARD = 2
TORCH = "torch._C"
"""Once this module is there, so is the OpenMP that it brings."""


def keep_freed_memory() -> None:
    """Tell the C allocator to keep what is freed for the next step, instead of returning it to the system.

    A training step frees and asks for the same gigabytes each time; by default every one of those pages is handed back,
    zeroed and faulted in again, which took a quarter of a CPU training step. Call it before threads are started: a
    thread keeps the arena it has.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 256 * 2**20)


def torch_threads(wanted: str | None, *, num_workers: int) -> dict[str, str]:
    """The variables that give one of so many workers on this machine its share of the cores, unless the user said otherwise.

    A lone worker gets torch's own default, as in threads of the controller: the same threads, so the same sums.
    """
    if wanted is not None:
        return {OMP: wanted}
    return {OMP: str(max(1, num_usable_cores() // num_workers))} if num_workers > 1 else {}


def release_helper_threads() -> None:
    """Let go of the OpenMP helpers of the calling thread; they come back with its next parallel operation.

    Each thread that computes has helpers of its own. Once they outnumber the cores, idle ones included, GNU OpenMP stops
    spinning between operations and sleeps instead, for everyone: decoding a small model became a third slower. So a
    worker that has nothing to do lets its helpers go. (`reroll_zoo/core_watch.py` makes use of the same rule where spinning
    does harm.)
    """
    library = gnu_openmp() if TORCH in sys.modules else None
    if library is not None:
        library.omp_pause_resource_all(OMP_PAUSE_HARD)


class CoreWatch(Protocol):
    """Looks whether threads of this process wait for a core that others use, and has them wait for each other kindly then."""

    def take_wait(self) -> float:
        """The share of its time that the worst-off thread waited for others' cores, on average since the last call."""

    def remark(self, wait: float) -> str:
        """What to tell the user of such a wait; empty if it is little."""


def core_watch() -> CoreWatch | None:
    """The watch of this process, started by whoever asks first. The entry point `open` of the group `reroll.core_watch`."""
    start = load_entry("reroll.core_watch", "open")
    return start() if start else None


@functools.cache
def gnu_openmp() -> ctypes.CDLL | None:
    """The copy of GNU OpenMP that torch loaded, if that is what it uses."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    library = ctypes.CDLL(libraries.pop()) if libraries else None
    return library if hasattr(library, "omp_pause_resource_all") and hasattr(library, "GOMP_parallel") else None


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Inside, the garbage collector ignores all objects that existed before, and looks at new ones seldom.

    Modules, models and engines are half a million long-lived objects. Scanning them takes 0.2 s or more, in which no thread
    runs, and thousands of samples would trigger the scan again and again. Nor do samples leave garbage in cycles: looking for
    it as often as usual took a third of the controller's time.
    """
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 10)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
