"""Every tensor of a batch goes along, whatever is done with its rows."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from reroll.tokens.batch import Batch

LENGTHS = [3, 2, 4]
NUM_TOKENS, NUM_SEQUENCES = sum(LENGTHS), len(LENGTHS)
TYPES = get_type_hints(Batch)
TENSORS = [each for each in fields(Batch) if Tensor in (TYPES[each.name], *get_args(TYPES[each.name]))]
"""All fields that may be one."""
SIZES = {"token": NUM_TOKENS, "sequence": NUM_SEQUENCES}
BY_TOKEN = [each.name for each in TENSORS if each.metadata["axis"] == "token"]
BY_SEQUENCE = [each.name for each in TENSORS if each.metadata["axis"] == "sequence"]


def full_batch() -> Batch:
    """Every field set, each to its own numbers: token t of field number f is 100 f + t."""
    tensors = {
        each.name: 100 * number + torch.arange(SIZES[each.metadata["axis"]])
        for number, each in enumerate(TENSORS)
        if each.name != "cu_seqlens"
    }
    return Batch(**tensors, cu_seqlens=torch.tensor([0, 3, 5, 9]), num_loss_tokens=7, num_sequences=3)


def test_every_tensor_says_what_its_first_axis_counts() -> None:
    axes = {each.name: each.metadata.get("axis") for each in TENSORS}
    assert set(axes.values()) == {"token", "sequence", "boundary"}, f"a field without an axis is lost by select: {axes}"
    assert [name for name, axis in axes.items() if axis == "boundary"] == ["cu_seqlens"]
    assert {"ids", "target_logp", "temperature"} <= set(BY_TOKEN)


def test_selected_sequences_take_all_their_fields_along() -> None:
    batch = full_batch()
    part = batch.select([2, 0])
    assert part.cu_seqlens.tolist() == [0, 4, 7]
    assert (part.num_loss_tokens, part.num_sequences) == (7, 3)
    for name in BY_TOKEN:
        assert torch.equal(getattr(part, name), getattr(batch, name)[[5, 6, 7, 8, 0, 1, 2]]), name
    for name in BY_SEQUENCE:
        assert torch.equal(getattr(part, name), getattr(batch, name)[[2, 0]]), name


def test_rearranged_tokens_take_their_fields_along_and_forget_their_sequences() -> None:
    batch, tokens = full_batch(), torch.tensor([8, 1, 0])
    part = batch.rearrange(tokens, [2, 1])
    assert part.cu_seqlens.tolist() == [0, 2, 3]
    for name in BY_TOKEN:
        assert torch.equal(getattr(part, name), getattr(batch, name)[tokens]), name
    assert all(getattr(part, name) is None for name in BY_SEQUENCE)


def test_a_batch_that_is_moved_is_moved_whole() -> None:
    moved = full_batch().to("meta")
    assert all(getattr(moved, each.name).device.type == "meta" for each in TENSORS)
