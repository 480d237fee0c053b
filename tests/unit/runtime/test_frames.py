"""Messages as bytes: what is packed here is what is read there."""

from __future__ import annotations

import gc
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from reroll.runtime import frames
from reroll.runtime.frames import MIN_SHARED_BYTES, FrameReader, Garbled, Kind, Payload, pack, send

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def sent(ends: Ends, value: Any) -> Any:
    """What arrives at the other end."""
    left, right = ends
    send(left, Kind.CALL, 7, pack(value, what="it"))
    (frame,) = FrameReader(right).read()
    assert (frame.kind, frame.number) == (Kind.CALL, 7)
    return frame.value()


@pytest.mark.parametrize("size", [0, 1, 1000, MIN_SHARED_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_every_dtype_arrive_equal_and_may_be_written(ends: Ends, size: int, dtype: torch.dtype) -> None:
    tensor = (torch.arange(size) % 3).to(dtype)
    back = sent(ends, {"tensor": tensor})["tensor"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    back.fill_(1)


def test_shapes_views_and_parameters_arrive(ends: Ends) -> None:
    scalar, view = torch.tensor(3.5), torch.arange(12.0).reshape(3, 4).t()[1:]
    parameter = torch.nn.Parameter(torch.ones(2))
    back_scalar, back_view, back_parameter, again = sent(ends, (scalar, view, parameter, view))
    assert back_scalar.shape == ()
    assert torch.equal(back_scalar, scalar)
    assert torch.equal(back_view, view)
    assert again is back_view
    assert isinstance(back_parameter, torch.nn.Parameter)
    assert back_parameter.requires_grad


def test_the_bytes_of_arrays_are_not_copied_into_the_pickle_nor_out_of_the_memory_they_came_in(ends: Ends) -> None:
    left, right = ends
    payload = pack([np.ones(MIN_SHARED_BYTES, np.uint8), torch.ones(MIN_SHARED_BYTES)], what="them")
    assert payload.inline is None
    assert 5 * MIN_SHARED_BYTES <= payload.size < 5 * MIN_SHARED_BYTES + 2000
    send(left, Kind.CALL, 1, payload)
    (frame,) = FrameReader(right).read()
    array, tensor = frame.value()
    array[0], tensor[0] = 77, 99.0
    memory = np.frombuffer(frame.payload, np.uint8)
    assert np.shares_memory(memory, array)
    assert np.shares_memory(memory, tensor.numpy())


def test_functions_of_no_module_travel_with_arrays_and_tensors_beside_them(ends: Ends) -> None:
    number, tensor = 4, torch.ones(MIN_SHARED_BYTES)
    payload = pack((lambda: number, tensor), what="them")
    assert payload.size < tensor.nbytes + 5000
    function, back = sent(ends, (lambda: number, torch.arange(5)))
    assert function() == 4
    assert torch.equal(back, torch.arange(5))


def test_memory_files_are_gone_when_nobody_holds_them(ends: Ends) -> None:
    before = num_memory_files()
    back = sent(ends, np.ones(MIN_SHARED_BYTES))
    gc.collect()
    assert back.sum() == MIN_SHARED_BYTES
    assert num_memory_files() == before + 1  # What the map itself keeps open.
    del back
    gc.collect()
    assert num_memory_files() == before


def num_memory_files() -> int:
    """Open descriptors of files that are memory. Those of other kinds come and go with other tests' leftovers."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The folder's own descriptor is closed by now.
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("/memfd:") for link in links)


def test_messages_of_all_sizes_keep_their_order(ends: Ends) -> None:
    left, right = ends
    sizes = [3, MIN_SHARED_BYTES, 10, 2 * MIN_SHARED_BYTES, 50_000, MIN_SHARED_BYTES, 1]
    for number, size in enumerate(sizes):
        send(left, Kind.ANSWER, number, pack(b"x" * size, what="it"))
    reader, got = FrameReader(right), []
    while len(got) < len(sizes):
        got += reader.read()
    assert [frame.number for frame in got] == list(range(len(sizes)))
    assert [len(frame.value()) for frame in got] == sizes


@pytest.mark.parametrize(
    "stray",
    [
        b"garbage" * 10,
        b"oh",
        b"rrl0",
        frames._HEADER.pack(b"rrl1", 3, 1, 1, MIN_SHARED_BYTES),
        frames._HEADER.pack(b"rrl1", 3, 0, 1, 1 << 50),
    ],
)
def test_what_is_no_message_is_told_and_not_waited_for(ends: Ends, stray: bytes) -> None:
    left, right = ends
    left.sendall(stray)
    with pytest.raises(Garbled):
        list(FrameReader(right).read())


def test_a_memory_file_that_is_too_small_is_no_message(ends: Ends) -> None:
    left, right = ends
    payload = Payload([pickle.dumps(b"x" * MIN_SHARED_BYTES)])
    assert payload.descriptor is not None
    os.ftruncate(payload.descriptor, 10)
    send(left, Kind.CALL, 1, payload)
    with pytest.raises(Garbled, match="too small"):
        list(FrameReader(right).read())
