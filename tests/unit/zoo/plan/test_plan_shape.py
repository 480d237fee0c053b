"""Sizes counted from a config.json against the model that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reroll.errors import ModelError
from reroll_zoo.plan.shape import COUNTED, parse_shape, shape_of

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(COUNTED))
def test_every_parameter_is_counted(family: str, tied: bool, tmp_path: Path) -> None:
    more = EXPERTS if family.endswith("moe") else {}
    config = AutoConfig.for_model(family, **SIZES, **more, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(str(tmp_path)).num_parameters == model.num_parameters()


def test_biases_are_counted_where_a_config_asks_for_them() -> None:
    config = AutoConfig.for_model("llama", **SIZES, attention_bias=True, mlp_bias=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parse_shape(config.to_dict()).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("google/gemma-2-9b-it", 9_241_705_984),
    ],
)
def test_models_known_by_name_have_the_size_they_are_published_with(model: str, num_parameters: int) -> None:
    assert shape_of(model).num_parameters == num_parameters


def test_of_experts_only_the_chosen_are_active_and_many_tokens_read_them_all() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    assert shape.num_active_parameters == pytest.approx(3.0e9, rel=0.05)
    embedding = shape.head_parameters
    assert shape.expected_read_parameters(1) == pytest.approx(shape.num_active_parameters)
    assert shape.expected_read_parameters(10_000) == pytest.approx(shape.num_parameters - embedding, rel=1e-3)


def test_a_text_model_inside_a_larger_one_is_found() -> None:
    inner = {key: value for key, value in SIZES.items() if key != "pad_token_id"}
    shape = parse_shape({"model_type": "gemma3", "text_config": {**inner, "model_type": "gemma3_text"}})
    assert (shape.family, shape.hidden, shape.is_tied) == ("gemma3_text", 48, True)


def test_an_adapter_has_the_sizes_of_its_base_and_its_own_rank(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    shape = shape_of(str(tmp_path))
    assert shape.num_parameters == 596_049_920
    # Rank 8 on q and v of 28 layers: 8 * (1024 + 2048) and 8 * (1024 + 1024) each.
    assert shape.lora_parameters(8, ["q_proj", "v_proj"]) == 28 * 8 * (1024 + 2048 + 1024 + 1024)


def test_a_model_without_sizes_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the weights are not needed"):
        shape_of("nobody/knows-this")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="hidden_size"):
        shape_of(str(tmp_path))
