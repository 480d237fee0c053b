"""What a reward's process may allocate."""

from __future__ import annotations

import resource
from pathlib import Path
from types import TracebackType

from reroll.errors import RewardError

_SIZES = Path("/proc/self/statm")


class MustRestart(RewardError):
    """Why there is no score; and the process should be replaced."""


class MemoryLimit:
    """While entered, this process may hold `memory_mb` more address space than when the limit was made; None: no limit.

    Allocations beyond it raise MemoryError. Where the system does not tell a process its size, there is no limit.
    """

    def __init__(self, memory_mb: int | None) -> None:
        _, self._hard = resource.getrlimit(resource.RLIMIT_AS)
        self._soft = self._hard
        if memory_mb is not None and _SIZES.exists():
            wanted = _address_space() + memory_mb * 2**20
            self._soft = wanted if self._hard == resource.RLIM_INFINITY else min(wanted, self._hard)

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self._soft, self._hard))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self._hard, self._hard))


def _address_space() -> int:
    """Bytes."""
    return int(_SIZES.read_text().split()[0]) * resource.getpagesize()
