"""Changes of weights, coded and applied: bit for bit what was sent, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from reroll.weights.buckets import PushBroken
from reroll_zoo.weight_changes import apply_change, encode_change

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


def of_bytes(data: object, dtype: torch.dtype) -> Tensor:
    """Any bits at all: NaNs with payloads, both zeros, denormals."""
    return torch.from_numpy(data).view(dtype)  # type: ignore[arg-type]


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@given(data=st.data(), dtype=st.sampled_from(DTYPES), size=st.integers(1, 40))
def test_a_change_makes_exactly_the_new_values_of_the_old(data: st.DataObject, dtype: torch.dtype, size: int) -> None:
    raw = arrays("uint8", size * dtype.itemsize)
    old, new = of_bytes(data.draw(raw), dtype), of_bytes(data.draw(raw), dtype)
    is_changed = torch.from_numpy(data.draw(arrays("bool", size)))
    new = torch.where(is_changed, new.view(dtype), old)
    want = bits(new)
    made = old.clone()
    apply_change(encode_change(new, base=old), base=made)
    assert bits(made) == want


@given(data=st.data())
def test_a_damaged_change_is_refused(data: st.DataObject) -> None:
    old, new = torch.zeros(50), torch.arange(50.0)
    coded = encode_change(new, base=old)
    position = data.draw(st.integers(0, coded.numel() - 1))
    coded[position] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        coded = coded[: data.draw(st.integers(0, coded.numel() - 1))]
    made = old.clone()
    with pytest.raises(PushBroken):
        apply_change(coded, base=made)
    assert torch.equal(made, old)


def test_few_changes_take_few_bytes() -> None:
    old = torch.randn(100_000).bfloat16()
    new = old.clone()
    new[::1000] += 1
    assert encode_change(new, base=old).numel() < old.nbytes / 100


def test_matrices_and_single_numbers_keep_their_shape() -> None:
    for old in (torch.randn(3, 5), torch.tensor(2.0)):
        made = old.clone()
        apply_change(encode_change(old + 1, base=old), base=made)
        assert torch.equal(made, old + 1)
