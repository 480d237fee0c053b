"""Messages between two processes of one machine, over a Unix socket: what is small travels in it, what is large beside it.

A frame is a header of fixed size (what kind, the number of the call, how long the payload is and how it is laid out) and a
payload: a pickle and, behind it, the arrays and CPU tensors that it speaks of, which are not copied into it. A payload from
`MIN_SHARED_BYTES` on is written to a memory file without a name, whose descriptor goes with the header; the receiver maps it,
and reads what the sender wrote without a copy of its own. The file is gone when nobody maps it any more, however its users end.
"""

from __future__ import annotations

import array
import copyreg
import functools
import io
import logging
import mmap
import os
import pickle
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from reroll.errors import RerollError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_SHARED_BYTES = 3 << 16
"""What the buffer of a Unix socket takes at once. Below, a memory file costs more than the copies that it saves; above, a
message through the socket needs the two sides to wake each other again and again (measured: 1 MiB takes a fifth in a file)."""
_CHUNK_BYTES = 1 << 18
"""Of one read of a socket."""
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)
_ALIGNMENT = 64
_MAGIC = b"rrl1"
_HEADER = struct.Struct("<4sBB2xQQ")
_SIZE = struct.Struct("<Q")
_HAS_MEMFD = hasattr(os, "memfd_create")


log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What a frame is. The controller sends all but ANSWER, which has the number of what it answers."""

    SETUP = 1
    """Where modules are, who the worker is, how many calls it serves at once. Comes first, and is not answered."""
    BUILD = 2
    CALL = 3
    CLOSE = 4
    FORGET = 5
    """Nobody waits for the call of this number any more: it is left out, if it has not begun."""
    ANSWER = 6
    STACKS = 7
    """The stacks of all threads are to be printed, whatever they do. Not answered."""


class CannotTravel(RerollError):
    """An object cannot be sent to another process, or not be read there."""


class Garbled(Exception):
    """What was read is no frame."""


class Layout(IntEnum):
    """Where a payload's bytes are, and what."""

    PARTS = 0
    """In the socket: the sizes of the pickle and of the arrays that it speaks of, then these."""
    SHARED = 1
    """The same in a memory file."""
    PLAIN = 2
    """In the socket: a pickle alone."""


class Payload:
    """A value as bytes: `inline`, or in a memory file that any number of processes can be shown."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.inline: bytes | None = None
        self.descriptor: int | None = None
        if len(parts) == 1 and len(parts[0]) < MIN_SHARED_BYTES:
            self.layout, self.inline, self.size = Layout.PLAIN, parts[0], len(parts[0])
            return
        views = [memoryview(part).cast("B") for part in parts]
        table = b"".join(_SIZE.pack(number) for number in (len(views), *(view.nbytes for view in views)))
        pieces: list[bytes | memoryview] = [table, *views]
        self.size = sum(_padded(len(piece)) for piece in pieces)
        if _HAS_MEMFD and self.size >= MIN_SHARED_BYTES:
            self.layout = Layout.SHARED
            self.descriptor = os.memfd_create("reroll", os.MFD_CLOEXEC)
            _write(self.descriptor, pieces)
        else:
            self.layout = Layout.PARTS
            self.inline = b"".join(bit for piece in pieces for bit in (piece, bytes(_padded(len(piece)) - len(piece))))

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def pack(value: Any, *, what: str) -> Payload:
    """A value to be sent. What plain pickling does not know, such as the functions and classes of a script or a notebook,
    travels whole. Raises CannotTravel, which calls the value `what`."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = _pickled(_Pickler, value, buffers)
        if b"__main__" not in body:  # A name there means something else in another process.
            return Payload([body, *(buffer.raw() for buffer in buffers)])
    except Exception as error:  # Objects raise what they like.
        log.debug("%s is no plain pickle: %s", what, error)
    buffers.clear()
    try:
        body = _pickled(_script_pickler(), value, buffers)
    except Exception as error:
        raise CannotTravel(
            f"{what} cannot be sent to another process ({type(error).__name__}: {error}): give what it is made from (a path, a "
            "config, numbers) and make it there; locks, open files, sockets and generators stay where they are. "
            "With runtime: {kind: local} nothing is sent"
        ) from error
    return Payload([body, *(buffer.raw() for buffer in buffers)])


class Frame(NamedTuple):
    """A message as it was received."""

    kind: int
    number: int
    payload: Any
    """Bytes that may be written, of this process alone."""
    layout: int

    def value(self) -> Any:
        """What was packed. Its arrays lie in the payload. Raises whatever an object raises that cannot be read here."""
        if self.layout == Layout.PLAIN:
            return pickle.loads(self.payload)
        view = memoryview(self.payload)
        (num_parts,) = _SIZE.unpack_from(view)
        sizes = [_SIZE.unpack_from(view, _SIZE.size * (1 + part))[0] for part in range(num_parts)]
        start, parts = _padded(_SIZE.size * (1 + num_parts)), []
        for size in sizes:
            parts.append(view[start : start + size])
            start += _padded(size)
        return pickle.loads(parts[0], buffers=parts[1:])


def header(kind: Kind, number: int, payload: Payload) -> bytes:
    """What goes before a payload's inline bytes, and with its descriptor."""
    return _HEADER.pack(_MAGIC, kind, payload.layout, number, payload.size)


def send(link: socket.socket, kind: Kind, number: int, payload: Payload) -> None:
    """Send a message over a blocking socket. Raises OSError if nobody reads it."""
    start = header(kind, number, payload)
    if payload.descriptor is not None:
        send_some(link, start, payload.descriptor)  # A header is whole or not there: it is far smaller than any buffer.
    else:
        assert payload.inline is not None
        link.sendall(start + payload.inline)


def send_some(link: socket.socket, data: Any, descriptor: int | None) -> int:
    """Send what the socket takes; how much that was. A descriptor goes with the first byte."""
    if descriptor is None:
        return link.send(data)
    return link.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


class FrameReader:
    """The frames of a socket, whose bytes arrive in pieces."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._bytes = bytearray()
        self._chunk = bytearray(_CHUNK_BYTES)
        self._descriptors: deque[int] = deque()
        self.is_at_end = False
        """The other side has closed the socket, or is gone."""

    def read(self) -> Iterator[Frame]:
        """The frames that one read of the socket completes. Raises Garbled, or OSError (BlockingIOError: nothing there)."""
        num_read, messages, _, _ = self._link.recvmsg_into([self._chunk], _ONE_DESCRIPTOR, _CLOSED_ON_EXEC)
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += array.array("i", data)
        if not num_read:
            self.is_at_end = True
            return
        self._bytes += memoryview(self._chunk)[:num_read]
        while self._bytes:
            if not self._bytes.startswith(_MAGIC[: len(self._bytes)]):  # Stray bytes are seen before there are many of them.
                raise self._garbled()
            if len(self._bytes) < _HEADER.size:
                return
            _, kind, layout, number, size = _HEADER.unpack_from(self._bytes)
            if (layout == Layout.SHARED) != (_HAS_MEMFD and size >= MIN_SHARED_BYTES):
                raise self._garbled()
            if layout == Layout.SHARED:
                del self._bytes[: _HEADER.size]
                yield Frame(kind, number, self._mapped(size), layout)
                continue
            end = _HEADER.size + size
            if len(self._bytes) < end:
                return
            payload = self._bytes[_HEADER.size : end]
            del self._bytes[:end]
            yield Frame(kind, number, payload, layout)

    def _garbled(self) -> Garbled:
        return Garbled(f"{bytes(self._bytes[:16])!r} begins no message")

    def close(self) -> None:
        """Let go of what came and was not asked for. The socket is its owner's."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _mapped(self, size: int) -> mmap.mmap:
        if not self._descriptors:
            raise Garbled("a message came without its memory")
        descriptor = self._descriptors.popleft()
        try:
            if os.fstat(descriptor).st_size < size:
                raise Garbled("the memory of a message is too small for it")
            # A private copy of whatever page is written to: several processes may map the same file.
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)


class _Pickler(pickle.Pickler):
    """Leaves the bytes of arrays and CPU tensors where they are."""

    dispatch_table: dict[type, Any]

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, 5, buffer_callback=buffers.append)
        self.dispatch_table = {**copyreg.dispatch_table, **_tensor_types()}


@functools.cache
def _script_pickler() -> type[pickle.Pickler]:
    """The same for functions and classes that no module holds, or only the one that was started."""
    import cloudpickle  # Few need it: not loaded by every process.

    class ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
            self.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(_tensor_types())  # It is looked at once, below.
            super().__init__(file, 5, buffer_callback=buffers.append)

    return ScriptPickler


def _pickled(pickler: Callable[..., pickle.Pickler], value: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    file = io.BytesIO()
    pickler(file, buffers).dump(value)
    return file.getvalue()


def _tensor_types() -> dict[type, Any]:
    """How tensors are pickled, once this process has loaded what they are."""
    module = sys.modules.get("torch")
    tensor = getattr(module, "Tensor", None)  # None while torch is still being imported, in another thread.
    return {} if tensor is None else {tensor: _reduce_tensor}


def _reduce_tensor(tensor: Tensor) -> Any:
    import torch

    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if not is_plain or tensor.is_complex() or tensor.is_quantized:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _tensor_of, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _tensor_of(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import torch

    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(descriptor: int, pieces: Sequence[Any]) -> None:
    """Each piece at the next multiple of the alignment."""
    start = 0
    for piece in pieces:
        view, place = memoryview(piece), start
        while view:
            num_written = os.pwrite(descriptor, view, place)
            view, place = view[num_written:], place + num_written
        start += _padded(len(piece))
    os.ftruncate(descriptor, start)
