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
from reroll.weights.slices import Box, Slice, hops, plan_slices, whole_box

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


@pytest.mark.parametrize("num_engines", range(1, 7))
@pytest.mark.parametrize("num_senders", range(1, 9))
def test_in_the_ring_every_engine_gets_every_piece_once_and_two_buffers_are_enough(num_engines: int, num_senders: int) -> None:
    """Played with messages that are only done when the other side takes them, as between GPUs."""
    got, links = play(num_engines, num_senders)
    assert all(sorted(senders) == list(range(num_senders)) for senders in got)
    assert len(links) == num_senders * num_engines, "a piece was sent more than once to an engine"
    out = [sum(source == ("engine", engine) for source, _ in links) for engine in range(num_engines)]
    assert max(out) <= num_senders, "an engine passes the model on once at most"


def play(num_engines: int, num_senders: int) -> tuple[list[list[int]], list[tuple[object, object]]]:
    """What each engine got, and every message: with two buffers, a message being done when both sides have come to it."""
    waiting: dict[tuple[object, object], deque[int]] = {}
    links: list[tuple[object, object]] = []
    got: list[list[int]] = [[] for _ in range(num_engines)]

    def engine(position: int) -> Iterator[None]:
        passing: list[tuple[tuple[object, object], int] | None] = [None, None]
        me, behind = ("engine", position), ("engine", (position + 1) % num_engines)
        for turn, hop in enumerate(hops(position, num_engines=num_engines, num_senders=num_senders)):
            kept = passing[turn % 2]
            while kept is not None and kept[1] in waiting.get(kept[0], ()):
                yield  # The buffer is still being passed on.
            source = ("sender", hop.sender) if hop.is_first else ("engine", (position - 1) % num_engines)
            if not hop.is_first:
                while not waiting.get((source, me)):
                    yield
                assert waiting[source, me].popleft() == hop.sender, "the two sides of a link disagree about what comes next"
            links.append((source, me))
            got[position].append(hop.sender)
            passing[turn % 2] = None
            if not hop.is_last:
                waiting.setdefault((me, behind), deque()).append(hop.sender)
                passing[turn % 2] = ((me, behind), hop.sender)

    running = [engine(position) for position in range(num_engines)]
    for _ in range(1000):
        running = [one for one in running if next(one, StopIteration) is not StopIteration]
        if not running:
            return got, links
    raise AssertionError("the ring waits for ever")
