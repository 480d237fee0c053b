"""The plan of a push: every element once, from a rank that holds it; and the ring by which engines have it from each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import ModelError
from reroll.weights.slices import Box, Ring, Slice, plan_slices, whole_box

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def held_by_ranks(draw: st.DrawFn) -> list[dict[str, Slice]]:
    """Weights that ranks of a mesh share: each axis cuts one along some dimension, or repeats it."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    held: list[dict[str, Slice]] = [{} for _ in range(int(np.prod(mesh)))]
    for number in range(draw(st.integers(0, 5))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from(["float32", "bfloat16"]))
        dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
        cuts = [draw(dims) for _ in mesh]
        for rank, where in enumerate(np.ndindex(*mesh)):
            box = whole_box(shape)
            for dim, num, index in zip(cuts, mesh, where, strict=True):
                box = box if dim is None else box.cut(dim, num=num, index=index)
            held[rank][str(number)] = Slice(str(number), box, shape, dtype)
    return held


@given(held=held_by_ranks(), bucket_bytes=st.integers(1, 2000))
def test_every_element_travels_exactly_once_from_a_rank_that_holds_it_in_bounded_buckets_of_whole_weights(
    held: list[dict[str, Slice]], bucket_bytes: int
) -> None:
    plan = plan_slices(held, bucket_bytes=bucket_bytes)
    counts = {name: np.zeros(part.shape, dtype=int) for name, part in held[0].items()}
    bucket_of: dict[str, int] = {}
    for rank, parts in enumerate(held):
        pieces = plan.of(rank)
        assert len(pieces) == len(plan.buckets)
        assert plan.bytes_of(rank) == sum(part.num_bytes for piece in pieces for part in piece)
        for index, part in ((index, part) for index, piece in enumerate(pieces) for part in piece):
            assert parts[part.name] == part
            counts[part.name][tuple(slice(a, a + b) for a, b in zip(*part.box, strict=True))] += 1
            assert bucket_of.setdefault(part.name, index) == index
    assert all((count == 1).all() for count in counts.values())
    in_order = [bucket_of[name] for name in held[0]]
    assert in_order == sorted(in_order)
    for index in range(len(plan.buckets)):
        names = {name for name, bucket in bucket_of.items() if bucket == index}
        num_bytes = sum(counts[name].size * (4 if held[0][name].dtype == "float32" else 2) for name in names)
        assert num_bytes <= bucket_bytes or len(names) == 1


@given(num=st.integers(1, 6), shape=SHAPES.filter(bool), data=st.data())
def test_a_dimension_is_cut_as_torch_cuts_it(num: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(int(np.prod(shape))).view(shape)
    parts = whole.chunk(num, dim)
    for index in range(num):
        box = whole_box(shape).cut(dim, num=num, index=index)
        if index < len(parts):
            assert torch.equal(whole[tuple(slice(a, a + b) for a, b in zip(*box, strict=True))], parts[index])
        else:
            assert box.size == 0


def test_of_ranks_that_hold_the_same_those_send_that_have_least_to_send() -> None:
    same = {str(number): Slice(str(number), whole_box((10,)), (10,), "float32") for number in range(12)}
    plan = plan_slices([same] * 4, bucket_bytes=80)
    assert [plan.bytes_of(rank) for rank in range(4)] == [120] * 4


def test_a_weight_of_which_a_part_is_missing_is_refused_by_name() -> None:
    part = Slice("norm", Box((0,), (3,)), (4,), "float32")
    with pytest.raises(ModelError, match=r"parts of norm do not add up to its shape \(4,\)"):
        plan_slices([{"norm": part}], bucket_bytes=100)


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
