"""`reroll train --page`: the page of a run served beside it, by which it is watched, paused, saved and stopped."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reroll.pipeline.controls import Hands
from reroll_zoo.page.run_data import RunData
from reroll_zoo.page.server import DEFAULT_HOST, PageServer


class PageCompanion:
    """A `reroll.pipeline.controls.Companion`. Its address and its token are the same after every restart, also of a controller
    that was killed: both are chosen here, before its process is forked."""

    def __init__(self, *, port: int) -> None:
        """Port 0 takes a free one."""
        self.port = port or _free_port()
        self.token = secrets.token_urlsafe(24)
        self._server: PageServer | None = None

    @contextmanager
    def beside(self, folder: Path) -> Iterator[None]:
        with PageServer(RunData(folder), port=self.port, token=self.token) as server, server.in_background():
            self._server = server
            yield

    @contextmanager
    def holding(self, hands: Hands) -> Iterator[str]:
        assert self._server is not None, "it stands beside a run before it may act on it"
        self._server.hands = hands
        try:
            yield f"page: {self._server.url}?token={self.token}"
        finally:
            self._server.hands = None


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((DEFAULT_HOST, 0))
        port: int = taken.getsockname()[1]
        return port
