"""A batch on its way to another process."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from reroll.tokens.batch import Batch, pack
from reroll.types import Sample


def batch() -> Batch:
    rows = [
        Sample(
            ids=np.arange(length),
            loss_mask=np.arange(length) > 1,
            logp=np.full(length, -0.5, np.float32),
            turn=np.where(np.arange(length) > 1, 0, -1),
        )
        for length in (4, 6)
    ]
    packed = pack(rows, temperature=0.7)
    return packed.replace(
        ref_logp=packed.logp * 2, target_logp=torch.randn(10, 3, dtype=torch.bfloat16), label=torch.tensor([1.0, -1.0])
    )


def same(left: object, right: object) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right


def test_every_field_arrives_as_it_was() -> None:
    sent = batch()
    back = pickle.loads(pickle.dumps(sent))
    assert all(same(getattr(sent, field.name), getattr(back, field.name)) for field in fields(Batch))
    assert back.target_logp.dtype == torch.bfloat16
    assert torch.equal(back.select([1]).ids, sent.select([1]).ids)


def test_a_reader_copies_nothing_and_is_not_warned() -> None:
    sent = batch()
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    stored = [bytes(buffer.raw()) for buffer in buffers]  # Read-only, as in an object store.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(body, buffers=stored)
    places = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in stored}
    assert {back.ids.data_ptr(), back.logp.data_ptr(), back.ref_logp.data_ptr(), back.cu_seqlens.data_ptr()} <= places
    assert torch.equal(back.ids, sent.ids)
