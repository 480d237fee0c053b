"""Layers that carry a state, packed: every row begins with an empty one, and is what Hugging Face's own makes of it alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model
from reroll.models.recurrent import attention_layers, recurrent_layers
from reroll.tokens.batch import Batch, pack
from reroll.training.predict import SharedPrefixAttention, distinct_tokens, token_states
from reroll.training.torch_strategy import enable_gradient_checkpointing
from reroll.types import Sample
from reroll_zoo.fsdp2.sequence import check_shares
from reroll_zoo.fsdp2.tensor import check_splits
from reroll_zoo.tiny_models import make_tiny

DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


MAMBA = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_5_text": DELTA, "falcon_h1": MAMBA}


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(Cache, "get_recurrent_state"):
        pytest.skip("this transformers is refused: its recurrent layers do not take their state as an argument")
    place, options = tmp_path_factory.mktemp("tiny"), FAMILIES[request.param]
    return make_tiny(place, family=request.param, hidden=32, initializer_range=0.1, **options)


@pytest.fixture
def ours(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, device="cpu")


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 90, (length,), generator=generator) for length in lengths]


def packed(model: PreTrainedModel, rows: list[Tensor], attention: Any = None) -> Tensor:
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return logits(model, hidden_states(model, torch.cat(rows), positions, attention or PackedAttention(bounds)))


@pytest.mark.parametrize("lengths", [(7,), (5, 5, 6), (3, 150, 1, 64, 70)], ids=["one", "even", "uneven"])
def test_packed_rows_are_each_alone(folder: Path, ours: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    rows, model = sequences(*lengths), plain(folder)
    with torch.no_grad():
        want = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
        torch.testing.assert_close(packed(ours, rows), want, atol=1e-5, rtol=0)


def test_a_rows_neighbours_change_nothing_of_it_and_get_none_of_its_gradient(ours: PreTrainedModel) -> None:
    first, second, other = sequences(20, 9, 33)
    with torch.no_grad():
        torch.testing.assert_close(packed(ours, [first, second])[20:], packed(ours, [other, second])[33:], atol=1e-5, rtol=0)
    given = []
    ours.get_input_embeddings().register_forward_hook(lambda *parts: given.append(parts[-1]))
    scores = packed(ours, [first, second])
    given[0].retain_grad()
    scores[20:].sum().backward()
    assert not given[0].grad[0, :20].any()
    assert given[0].grad[0, 20:].any()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_each_row_alone(folder: Path, ours: PreTrainedModel, checkpointed: bool) -> None:
    rows, model = sequences(3, 80, 1, 9), plain(folder)
    if checkpointed:
        enable_gradient_checkpointing(ours)
    packed(ours, rows).logsumexp(-1).sum().backward()
    sum(model(row[None], use_cache=False).logits.logsumexp(-1).sum() for row in rows).backward()
    for (name, got), (_, want) in zip(ours.named_parameters(), model.named_parameters(), strict=True):
        assert got.grad is not None, name
        assert want.grad is not None, name
        largest = max(1.0, float(want.grad.abs().max()))
        torch.testing.assert_close(got.grad / largest, want.grad / largest, atol=1e-5, rtol=0, msg=name)


def siblings() -> Batch:
    prompt = sequences(40)[0]
    rows = [torch.cat([prompt, answer]) for answer in sequences(5, 9, 7)]
    masks = [torch.arange(len(row)) >= 40 for row in rows]
    return pack(
        [
            Sample(
                ids=row.numpy(),
                loss_mask=mask.numpy(),
                logp=torch.zeros(len(row)).numpy(),
                turn=torch.where(mask, 0, -1).numpy(),
            )
            for row, mask in zip(rows, masks, strict=True)
        ]
    )


def test_siblings_are_computed_whole_each(folder: Path, ours: PreTrainedModel) -> None:
    batch, model = siblings(), plain(folder)
    assert len(distinct_tokens(batch).ids) < batch.num_tokens, "where nothing carries a state, their prompt is computed once"
    with torch.no_grad():
        got = token_states(ours, batch).hidden
        rows = [batch.ids[start:end] for start, end in pairwise(batch.cu_seqlens.tolist())]
        want = torch.cat([model.base_model(row[None], use_cache=False).last_hidden_state[0] for row in rows])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_a_pass_that_merges_prefixes_is_refused(ours: PreTrainedModel) -> None:
    distinct = distinct_tokens(siblings())
    assert isinstance(distinct.attention, SharedPrefixAttention)
    with pytest.raises(ModelError, match="every sequence whole"):
        hidden_states(ours, distinct.ids, distinct.positions, distinct.attention)


def test_calling_the_model_directly_says_how_to_run_it(ours: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="hidden_states"):
        ours(torch.tensor([[5, 6]]))


def test_ranks_that_would_share_a_sequence_or_a_layer_are_refused(ours: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match=r"strategy\.sp to 1"):
        check_shares(ours, sp=2, tp=1)
    with pytest.raises(ModelError, match=r"strategy\.tp to 1"):
        check_splits(ours, tp=2)


def test_keys_and_values_are_kept_for_layers_with_attention_alone(ours: PreTrainedModel) -> None:
    are_apart = ours.config.model_type == "qwen3_5_text"
    assert list(recurrent_layers(ours)) == ([0] if are_apart else [0, 1])
    assert attention_layers(ours) == ([1] if are_apart else [0, 1])


def test_an_adapter_leaves_out_what_a_kernel_would_take_past_it(folder: Path) -> None:
    adapted = load_model(str(folder), dtype=torch.float32, device="cpu", lora=LoraConfig(rank=2))
    names = {name.partition(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert "q_proj" in names
    if adapted.config.model_type == "qwen3_5_text":
        assert {"in_proj_qkv", "out_proj"} <= names
    else:
        assert "in_proj" in names
        assert "out_proj" not in names
