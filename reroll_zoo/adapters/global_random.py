"""Python's and numpy's global random generators, lent to one episode at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_lock = threading.RLock()


class GlobalRandom:
    """The global generators as one episode left them.

    Some libraries draw from the global generators, so that episodes played side by side would change each other's luck.
    Every episode with one of these keeps a state of its own: it is put in place for a call and taken out again after it.
    """

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, ...] = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What runs inside draws from this episode's generators; one episode of the process at a time."""
        with _lock:
            outside = _get()
            _set(self._states)
            try:
                yield
            finally:
                self._states = _get()
                _set(outside)


def _get() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()


def _set(states: tuple[Any, ...]) -> None:
    python, numpy = states
    random.setstate(python)
    np.random.set_state(numpy)
