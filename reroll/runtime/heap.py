"""What Python's garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_heap() -> Iterator[None]:
    """While this is open, the garbage collector passes over all objects that were there before.

    Modules, models and engines are half a million objects that stay. To look through them takes 0.2 s and more, in which no
    thread runs, and thousands of samples make the collector look again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
