from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reroll.models.attention import PackedAttention, hidden_states
from reroll.models.load import load_model
from reroll.models.tiny import make_tiny
from reroll.tokens.batch import Batch, pack
from reroll.train.shared_prefix import batch_hidden_states
from reroll.types import Sample

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
            hidden = batch_hidden_states(model, batch)
        else:
            hidden = hidden_states(model, batch.ids, batch.positions, PackedAttention(batch.cu_seqlens))
        (hidden * weights).sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_the_model_runs_on_distinct_tokens_only(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path)), dtype=torch.float32, device="cpu")
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    batch = siblings()
    hidden = batch_hidden_states(model, batch)
    assert hidden.shape == (batch.num_tokens, 64)
    assert seen == [7 + 5 + sum(range(3, 9)) + 9]
