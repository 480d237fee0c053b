"""The plan of a push: every element once, from a rank that holds it; and the ring by which engines have it from each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import ModelError
from reroll.weights.slices import Box, Slice, plan_slices, whole_box

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
