"""Checkpoints of 4-bit experts and of 8-bit floats: read, trained and written as the plain weights they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.parts import ModelConfig
from reroll.errors import ModelError
from reroll.models.load import load_model, load_tokenizer, save_model
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.model_check.contract import measure
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.tiny_models import make_tiny

NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What four bits stand for in MXFP4: a sign, two bits of exponent, one of mantissa."""
BLOCK = 16
"""Rows and columns that share a scale in FP8."""


def make_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A tiny gpt-oss with random 4-bit experts, and the plain weights that they stand for."""
    make_tiny(folder, family="gpt_oss", hidden=32, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)  # type: ignore[arg-type]
    plain = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight
            continue
        experts, given, told = weight.shape
        codes = torch.randint(0, 16, (experts, told, given // 32, 32))
        scales = torch.randint(122, 126, (experts, told, given // 32))
        values = NIBBLES[codes] * 2.0 ** (scales - 127)[..., None]
        plain[name] = values.reshape(experts, told, given).transpose(1, 2).contiguous()
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
    _write(folder, stored, {"quant_method": "mxfp4"})
    return plain


def make_fp8(folder: Path) -> dict[str, Tensor]:
    """A tiny Qwen3 with experts whose matrices are 8-bit floats, and the plain weights that they stand for."""
    if transformers.__version__.startswith("5.16."):
        pytest.skip("transformers reads fp8 as plain weights since 5.17, and before it is refused")
    make_tiny(folder, family="qwen3_moe", hidden=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    plain = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in plain.items():
        if "proj" not in name:
            stored[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = small.reshape(rows, columns), scales
        plain[name] = (small.float() * scales[:, None, :, None]).reshape(rows, columns)
    _write(folder, stored, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"})
    return plain


def _write(folder: Path, weights: dict[str, Tensor], method: dict[str, Any]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _mark(folder, method)


def _mark(folder: Path, method: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


MAKERS = {"mxfp4": make_mxfp4, "fp8": make_fp8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", MAKERS)
def test_quantized_weights_are_read_and_written_as_the_plain_ones_they_stand_for(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    plain = MAKERS[method](tmp_path / "quantized")
    model = load_model(str(tmp_path / "quantized"), dtype=dtype, device="cpu")
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    save_model(model, load_tokenizer(str(tmp_path / "quantized")), tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[name], weight.to(dtype)) for name, weight in plain.items())
    # Hugging Face's own code reads the folder, and means the same.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype)
    assert all(torch.equal(ours, weight) for ours, weight in zip(model.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("method", MAKERS)
def test_a_quantized_model_trains_and_writes_as_hugging_faces_own(tmp_path: Path, method: str) -> None:
    MAKERS[method](tmp_path)
    found = measure(str(tmp_path))
    assert found.agrees, found
    assert not found.engine_refused


@pytest.mark.parametrize("method", MAKERS)
def test_ranks_make_the_same_model_without_its_weights(tmp_path: Path, method: str) -> None:
    MAKERS[method](tmp_path)
    folder = str(tmp_path)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    empty = skeleton(ModelConfig(model=folder), load_tokenizer(folder), head="language")
    assert {name: each.shape for name, each in empty.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    assert not hasattr(empty.config, "quantization_config")


def test_a_checkpoint_that_nobody_can_train_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    _mark(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"'gptq'.*original checkpoint.*mxfp4 and fp8"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_the_command_writes_a_plain_folder_once(tmp_path: Path) -> None:
    plain = make_mxfp4(tmp_path / "quantized")
    with pytest.raises(ModelError, match="reroll models dequantize"):  # vLLM and SGLang read the folder themselves.
        HFWeightAssembler(str(tmp_path / "quantized"), lora=None)
    command = ["models", "dequantize", str(tmp_path / "quantized"), str(tmp_path / "plain")]
    assert CliRunner().invoke(app, command).exit_code == 0
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(written[name], weight.bfloat16()) for name, weight in plain.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template
    HFWeightAssembler(str(tmp_path / "plain"), lora=None)
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0
    assert "already there" in again.output + str(again.exception)
