"""Child processes that run user code: how their end is told, how they are ended, and how they talk to their parent."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">Q")
_PARENT_CHECK_S = 1.0


def follow_parent() -> None:
    """Let this process die with its parent, even while user code hangs."""
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="follow parent", daemon=True).start()


def kill_group(pid: int) -> None:
    """End a process that leads a session of its own, and all that it started, now. Harmless if they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def epitaph(exit_code: int) -> str:
    """How a process ended, as a user knows it: ` (exit code 3)` or ` (SIGSEGV)`."""
    return f" ({signal.Signals(-exit_code).name})" if exit_code < 0 else f" (exit code {exit_code})"


def last_lines(error: BaseException) -> str:
    """Type, message and place of an exception in user code, short enough for a status."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip() + place


def framed(message: Any) -> bytes:
    """A message as bytes for a stream."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def read_frames(stream: BinaryIO) -> Iterator[Any]:
    """The messages of a stream until the other side closes it."""
    while len(header := stream.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(header)
        body = stream.read(size)
        if len(body) < size:
            return
        yield pickle.loads(body)


class Unframer:
    """The messages of a stream whose bytes arrive in pieces."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + size
            if len(self._received) < end:
                return
            body = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield pickle.loads(body)
