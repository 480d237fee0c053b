"""The socket between the pool and one of its processes: whole messages, under a deadline, and nothing else.

User code shares the process at the other end. It may write to every descriptor and start processes that inherit them, so
neither the length of a message nor that it answers the last question is believed without a look.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from typing import Any

from reroll.runtime.children import Unframer, framed

_MAX_ANSWER_BYTES = 1 << 24
"""Of a score with all its names. Stray bytes read as a length are far more."""
_CHUNK_BYTES = 1 << 16


class Garbled(Exception):
    """What came is no message, or not the one that was due."""


class Line:
    """The pool's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unframer = Unframer(max_bytes=_MAX_ANSWER_BYTES)
        self._messages: deque[Any] = deque()

    def send(self, message: Any, *, timeout_s: float) -> None:
        """Raises TimeoutError if nobody reads it in time, or another OSError if nobody can."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(framed(message))

    def receive(self, *, timeout_s: float) -> Any:
        """The next message, all of it within this time. Raises TimeoutError, EOFError, another OSError, or Garbled."""
        until_s = time.monotonic() + timeout_s
        while not self._messages:
            self._socket.settimeout(max(until_s - time.monotonic(), 1e-6))  # 0 would mean not to wait, and is another error.
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise EOFError
            try:
                self._messages += self._unframer.feed(data)
            except (ValueError, TypeError, LookupError, AttributeError, ImportError, EOFError, pickle.PickleError) as error:
                raise Garbled(f"{type(error).__name__}: {error}") from None
        return self._messages.popleft()

    @property
    def is_quiet(self) -> bool:
        """Whether the other side is there and has said nothing that was not asked for."""
        if self._messages or not self._unframer.is_between_messages:
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()
