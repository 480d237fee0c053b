"""Work on many names, each in a process of its own: one that crashes or hangs costs its own name alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no answer, and why."""

    reason: str


def in_processes(
    work: Callable[[str], Any], names: Sequence[str], *, at_once: int, limit_s: float, preload: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Each name with what `work` makes of it, or with `Lost`, as they come. After `limit_s` what is left is lost.

    Processes are forks of one that has imported `preload`. What they print is not shown.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ends_at = time.monotonic() + limit_s

    def ask(name: str) -> tuple[str, Any]:
        if time.monotonic() >= ends_at:
            return name, Lost("there was no time left for it")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(work, name, sender), daemon=True)
        process.start()
        sender.close()
        try:
            if not receiver.poll(max(0.0, ends_at - time.monotonic())):
                return name, Lost("it did not end in time")
            return name, receiver.recv()
        except EOFError:
            process.join()
            return name, Lost(f"its process ended with exit code {process.exitcode}")
        finally:
            process.kill()
            process.join()

    with ThreadPoolExecutor(at_once) as threads:
        for future in as_completed([threads.submit(ask, name) for name in names]):
            yield future.result()


def _answer(work: Callable[[str], Any], name: str, sender: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        answer = work(name)
    except Exception as error:
        answer = Lost(f"{type(error).__name__}: {error}")
    sender.send(answer)
