"""Hugging Face folders in, Hugging Face folders out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from reroll.config.host import models_dir
from reroll.errors import ModelError
from reroll.models.attention import IMPLEMENTATION, check_supported

Precision = Literal["fp32", "bf16"]

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What a model is loaded as, by the config's name for it."""

_LOAD_FAILURES = (OSError, ValueError, KeyError, ImportError, RuntimeError)
"""What transformers raises for a folder or hub id that it cannot use."""

_LOADING = threading.Lock()
"""Transformers changes process-wide defaults while it builds a model, so workers in threads must load one by one."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which break up ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def resolve_model(name: str) -> str:
    """The folder that `name` means: an existing folder, or a fetched model; else `name` itself, taken as a hub id."""
    for folder in (Path(name).expanduser(), models_dir() / name):
        if (folder / "config.json").is_file():
            return str(folder)
    folder = Path(name).expanduser()
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {folder}: check the path, or name a model of the hub or of `reroll models fetch`")
    return name


def load_model(name: str, *, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The causal language model `name` with reroll's attention, in eval mode."""
    source = resolve_model(name)
    try:
        with _LOADING, quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except _LOAD_FAILURES as error:
        raise _load_error(name, "model", error) from error
    check_supported(model)
    return model.to(device).eval()  # type: ignore[no-any-return, arg-type]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer stored with the model `name`."""
    source = resolve_model(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except _LOAD_FAILURES as error:
        raise _load_error(name, "tokenizer", error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {name} has no end-of-sequence token: set eos_token in its tokenizer_config.json")
    return tokenizer


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary Hugging Face folder: config, safetensors, tokenizer and chat template."""
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_error(name: str, part: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"cannot load the {part} {name!r}: {reason} "
        "(name a Hugging Face folder with a causal language model, a hub id while online, or a model of `reroll models fetch`)"
    )
