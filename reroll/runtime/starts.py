"""How a worker's process may be started otherwise than as a fresh interpreter: the seam of `processes.py`.

What the entry point `fork` of the group `reroll.process_starts` names is called as `(order, link) -> RunningProcess | None`,
for workers that have no GPU of their own; with None, or where none is installed, an interpreter is started.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from reroll.config.registry import load_entry


class Order(NamedTuple):
    """What a worker is told before it begins."""

    name: str
    module: str
    """Of ours, or empty: whoever starts workers may import it beforehand."""
    environment: Mapping[str, str]
    mark: str
    folder: str
    """The working directory."""
    runs_user_code: bool = False
    """Then it prints nowhere, and it must not begin with what it does not need: it may have a limit of memory."""


class RunningProcess(Protocol):
    """A worker's process as the controller sees it. Safe to use from several threads."""

    @property
    def pid(self) -> int | None:
        """Once it is known."""

    @property
    def returncode(self) -> int | None:
        """Once it has ended."""

    def kill(self) -> None:
        """It and its session, now or as soon as it is there. Harmless if it has ended."""

    def wait(self) -> int:
        """Until it has ended; its session is ended then. Returns the exit code, or minus the signal."""


def start_otherwise(order: Order, link: socket.socket) -> RunningProcess | None:
    """A worker that serves at `link`, started by what is installed; None if nothing is that can."""
    start: Callable[[Order, socket.socket], RunningProcess | None] | None = load_entry("reroll.process_starts", "fork")
    return start(order, link) if start else None
