"""What a process that computes on the CPU asks of the C library and of OpenMP. Both calls do nothing elsewhere."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8

_OMP_PAUSE_HARD = 2


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


def release_helper_threads() -> None:
    """Let go of the OpenMP helpers of the calling thread; they come back with its next parallel operation.

    Each thread that computes has helpers of its own. Once they outnumber the cores, idle ones included, GNU OpenMP stops
    spinning between operations and sleeps instead, for everyone: decoding a small model became a third slower. So a
    worker that has nothing to do lets its helpers go.
    """
    pause = _omp_pause() if "torch" in sys.modules else None
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


@functools.cache
def _omp_pause() -> Callable[[int], int] | None:
    """GNU OpenMP's `omp_pause_resource_all`, from the copy of the library that torch loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    if not libraries:
        return None
    pause: Callable[[int], int] | None = getattr(ctypes.CDLL(libraries.pop()), "omp_pause_resource_all", None)
    return pause
