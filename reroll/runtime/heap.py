"""What Python's garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def settle_heap() -> None:
    """From now on the garbage collector passes over all objects that are there.

    Modules, models and engines are half a million objects that stay. To look through them takes some 0.3 s, in which no
    other thread runs, and thousands of samples make the collector look often: as much as once in a step.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def settled_heap() -> Iterator[None]:
    """The same for as long as this is open."""
    settle_heap()
    try:
        yield
    finally:
        gc.unfreeze()
