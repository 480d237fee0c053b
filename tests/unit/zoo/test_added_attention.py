"""What rows add to shared prefixes asks alone on a CPU, and looks at what it would look at if all asked."""

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.models.attention import PackedAttention, Scoring
from reroll.tokens.packing import shared_prefixes
from reroll.training import predict as predict_module
from reroll.training.predict import SharedPrefixAttention
from reroll_zoo.added_attention import AddedAttention


def rows() -> list[np.ndarray]:
    """Siblings, an agent's turns, a row twice, a row inside another, one that adds a single token, and one of its own."""
    rng = np.random.default_rng(0)
    prompt, context = rng.integers(4, 90, size=20), rng.integers(4, 90, size=60)
    siblings = [np.concatenate([prompt, rng.integers(4, 90, size=size)]) for size in (3, 9, 30)]
    turns = [context[:size] for size in (15, 33, 34, 60)]
    return [
        siblings[0],
        turns[2],
        siblings[1],
        turns[0],
        siblings[0],
        turns[3],
        rng.integers(4, 90, size=7),
        siblings[2],
        turns[1],
    ]


def results(attention: SharedPrefixAttention, num_distinct: int, dtype: torch.dtype) -> list[Tensor]:
    """What three layers' worth of states attend to, and the gradients."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(num_distinct, heads, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    output = attention.attend(0, *made, scoring=Scoring(scaling=0.3))
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    assert output.dtype == dtype
    return [output.detach(), *(tensor.grad for tensor in made if tensor.grad is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_outputs_and_gradients_are_those_of_rows_that_ask_whole(dtype, tolerance, monkeypatch):
    packed = torch.from_numpy(np.concatenate(rows()))
    bounds = torch.tensor([0, *np.cumsum([len(row) for row in rows()])])
    shared = shared_prefixes(packed, bounds)
    assert 0 in shared.num_added.tolist()
    assert 1 in shared.num_added.tolist()
    alone = results(SharedPrefixAttention(PackedAttention(bounds), shared, bounds), len(shared.first), dtype)
    monkeypatch.setattr(predict_module, "load_entry", lambda group, name: None)
    whole = results(SharedPrefixAttention(PackedAttention(bounds), shared, bounds), len(shared.first), dtype)
    for got, want in zip(alone, whole, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().max()), rtol=tolerance)


def test_only_what_is_added_asks():
    first, second, third = torch.arange(40), torch.arange(30), torch.arange(30)
    ids = torch.cat([first, second, torch.tensor([90, 91]), third, torch.tensor([92])])
    bounds = torch.tensor([0, 40, 72, 103])
    attention = AddedAttention(shared_prefixes(ids, bounds), bounds)
    assert sorted(group.asks.numel() for group in attention._groups) == [1, 2, 40]
