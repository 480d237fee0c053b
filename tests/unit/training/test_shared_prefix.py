from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from reroll.models import attention as attention_module
from reroll.models.attention import PackedAttention, VarlenAttention, hidden_states
from reroll.models.load import load_model
from reroll.tokens.batch import Batch, pack
from reroll.training.predict import token_states
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 4},
}


def siblings() -> Batch:
    """Two groups that share their prompts, two rows that are equal, and a row of its own, all mixed up."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 90, size=size) for size in (7, 5)]
    rows = [np.concatenate([prompts[place % 2], rng.integers(4, 90, size=3 + place)]) for place in range(6)]
    rows += [rows[2], rng.integers(4, 90, size=9)]
    return pack(
        [
            Sample(
                ids=row,
                loss_mask=np.arange(len(row)) > 4,
                logp=np.zeros(len(row)),
                turn=np.where(np.arange(len(row)) > 4, 0, -1),
            )
            for row in rows
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_computing_every_token(tmp_path: Path, family: Any) -> None:
    model = load_model(str(make_tiny(tmp_path, family=family, **FAMILIES[family])), dtype=torch.float32, device="cpu")
    batch = siblings()
    weights = torch.randn(batch.num_tokens, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for shared in (True, False):
        model.zero_grad()
        if shared:
            hidden = token_states(model, batch).hidden
        else:
            hidden = hidden_states(model, batch.ids, batch.positions, PackedAttention(batch.cu_seqlens))
        (hidden * weights).sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def plain_varlen(query, key, value, query_bounds, key_bounds, most_queries, most_keys, *, scale, window_size, enable_gqa):
    """What PyTorch's kernel is documented to do, sequence by sequence: the last tokens of each ask."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    outputs = []
    for (first, end), (first_key, end_key) in zip(pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        asked = torch.arange(first_key, end_key)
        asking = torch.arange(end_key - (end - first), end_key)[:, None]
        visible = (asked <= asking) & ((asked >= asking - window_size[0]) | (window_size[0] < 0))
        parts = (query[first:end], key[first_key:end_key], value[first_key:end_key])
        attended = scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts), attn_mask=visible, scale=scale)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_kernel_in_which_added_tokens_ask_alone_gives_the_same(tmp_path: Path, monkeypatch: Any, family: Any) -> None:
    """PyTorch's kernel needs a GPU (tests/gpu holds it to the same); here a plain one stands for it."""
    pytest.importorskip("triton")
    model = load_model(str(make_tiny(tmp_path, family=family)), dtype=torch.float32, device="cpu")
    batch, results = siblings(), []
    weights = torch.randn(batch.num_tokens, 64, generator=torch.Generator().manual_seed(0))
    for takes in (False, True):
        monkeypatch.setattr(attention_module, "varlen_attn", plain_varlen)
        monkeypatch.setattr(attention_module, "_SHARES_HEADS", True)
        monkeypatch.setattr(VarlenAttention, "takes", lambda value, scoring, takes=takes: takes)
        model.zero_grad()
        hidden = token_states(model, batch).hidden
        (hidden * weights).sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_the_model_runs_on_distinct_tokens_only(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path)), dtype=torch.float32, device="cpu")
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    batch = siblings()
    hidden = token_states(model, batch).hidden
    assert hidden.shape == (batch.num_tokens, 64)
    assert seen == [7 + 5 + sum(range(3, 9)) + 9]
