"""The ring of engines: every chunk reaches every engine once, and none waits for another in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll_zoo.push_ring.order import Ring


@pytest.mark.parametrize("num_engines", range(1, 8))
@pytest.mark.parametrize("num_senders", [1, 2, 3, 4, 7, 12])
def test_in_the_ring_each_engine_gets_every_chunk_once_and_none_waits_in_a_circle(num_engines: int, num_senders: int) -> None:
    ring = Ring(num_senders, num_engines)
    chunks = [(sender, chunk) for sender in range(num_senders) for chunk in range(ring.num_chunks)]
    got, num_passed = play(ring)
    assert all(sorted(mine) == chunks for mine in got)
    assert max(num_passed) <= len(chunks), "an engine passes the model on once at most"
    assert sum(num_passed) == len(chunks) * (num_engines - 1), "each chunk leaves its sender once"


@given(num_bytes=st.integers(0, 500), num_engines=st.integers(1, 9), num_senders=st.integers(1, 9))
def test_the_chunks_of_a_piece_are_the_piece(num_bytes: int, num_engines: int, num_senders: int) -> None:
    ring, piece = Ring(num_senders, num_engines), list(range(num_bytes))
    assert [byte for chunk in range(ring.num_chunks) for byte in piece[ring.part(num_bytes, chunk)]] == piece


def play(ring: Ring) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """What each engine got, in order, and how much it passed on, where an engine takes one chunk after the other."""
    links = [deque[tuple[int, int]]() for _ in range(ring.num_engines)]
    """What was passed on to each engine and not taken yet."""
    got: list[list[tuple[int, int]]] = [[] for _ in links]
    num_passed = [0] * ring.num_engines

    def engine(position: int) -> Iterator[None]:
        for hop in ring.hops(position):
            one = (hop.sender, hop.chunk)
            if hop.is_first:
                assert ring.entry_of(*one) == position
            else:
                while not links[position]:
                    yield
                assert links[position].popleft() == one, "the two sides of a link disagree about what comes next"
            got[position].append(one)
            if not hop.is_last:
                num_passed[position] += 1
                links[(position + 1) % ring.num_engines].append(one)

    running = [engine(position) for position in range(ring.num_engines)]
    for _ in range(1000):
        running = [one for one in running if next(one, StopIteration) is not StopIteration]
        if not running:
            return got, num_passed
    raise AssertionError("the ring waits for ever")
