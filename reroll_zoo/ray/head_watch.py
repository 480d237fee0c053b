"""Whether the head of a Ray cluster still answers: a run whose head is lost ends with a sentence, and does not wait in vain.

Ray itself waits for a head that is gone for a minute, in calls that nobody can interrupt, and then ends the process without a
word; for one that is stopped or out of reach it waits for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reroll.errors import RerollError

T = TypeVar("T")

PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 5.0
LEAVE_S = 15.0
"""How long a run may take to end when its head is lost. Then it is inside Ray, and does not come back."""
_RAYS_LIMIT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After which Ray ends the process: longer where heads are known to come back."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of gRPC begins: a server that is alive says something, or hangs up."""
_EXIT_CODE = 1


class HeadLost(RerollError):
    """The head of the Ray cluster does not answer any more."""


class HeadWatch:
    """A thread that asks the head for a sign of life, and the calls that end when there is none for too long.

    Made in the event loop that the calls belong to.
    """

    def __init__(self, address: str, *, on_exit: Callable[[], None], lost_after_s: float | None = None) -> None:
        """`on_exit` ends what this process has started with Ray; called if the head is lost, right before this process ends."""
        self._loop = asyncio.get_running_loop()
        self._address, self._on_exit = address, on_exit
        self._lost_after_s = lost_after_s or float(os.environ.get(_RAYS_LIMIT_S, "60")) / 2
        self._error: HeadLost | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="head watch", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """What a call gives; HeadLost as soon as the head is known to be lost."""
        waiting = asyncio.ensure_future(call)
        self._calls.add(waiting)
        waiting.add_done_callback(self._calls.discard)
        if self._error is not None:
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is None or (task is not None and task.cancelling()):
                raise
            raise self._error from None

    def close(self) -> None:
        """The run has left the cluster, or all of it that can be left."""
        self._is_over.set()

    def _watch(self) -> None:
        silent_since_s: float | None = None
        while not self._is_over.wait(PROBE_EVERY_S):
            asked_s = time.monotonic()
            if answers(self._address, timeout_s=PROBE_TIMEOUT_S):
                silent_since_s = None
            elif silent_since_s is None:
                silent_since_s = asked_s
            elif time.monotonic() - silent_since_s > self._lost_after_s:
                self._lose()
                return

    def _lose(self) -> None:
        """Have the run end by itself; where it cannot, because it is inside Ray, end it from here."""
        error = HeadLost(
            f"the head of the Ray cluster at {self._address} has not answered for {self._lost_after_s:g} s: it is lost, or out "
            "of reach. Start a cluster, set runtime.address to it, and go on from the last checkpoint with --resume"
        )
        atexit.register(self._exit)  # Before Ray's own farewell, which would wait for the head.
        self._loop.call_soon_threadsafe(self._tell, error)
        if self._is_over.wait(LEAVE_S):
            threading.main_thread().join()
            time.sleep(LEAVE_S)  # A thread that is inside Ray keeps the others from leaving.
        else:
            print(f"error: {error}", file=sys.stderr)
        self._exit()

    def _tell(self, error: HeadLost) -> None:
        self._error = error
        for call in self._calls:
            call.cancel()

    def _exit(self) -> None:
        self._on_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODE)


def answers(address: str, *, timeout_s: float) -> bool:
    """Whether the server at `host:port` is alive. One that a signal has stopped still takes connections, and says nothing."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.sendall(_GREETING)
            connection.recv(1)
    except OSError:
        return False
    return True
