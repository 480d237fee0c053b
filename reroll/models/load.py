"""Hugging Face folders in, Hugging Face folders out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from reroll.config.host import adapter_base, is_path, model_folder
from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.models.attention import IMPLEMENTATION, check_supported
from reroll.models.exact import make_exact
from reroll.models.fused import fuse, prepare
from reroll.models.heads import SCORE, add_score_head, score_head
from reroll.models.quantized import dequantizing, forget_quantization, plain_config
from reroll.models.recurrent import mix_packed
from reroll.models.sight import auto_class, eye_of, open_eye

Precision = Literal["fp32", "bf16", "fp8"]

Head = Literal["language", "score", "language+score"]
"""What a model ends in: words, one number (critics and reward models), or both on one trunk."""

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What a model is loaded as, by the config's name for it."""

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The names that safetensors has for them."""

_LOAD_FAILURES = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError)
"""What transformers raises for a folder or hub id that it cannot use."""

_LOADING = threading.Lock()
"""Transformers changes process-wide defaults while it builds a model, so workers in threads must load one by one. They save
one by one too: progress bars are switched off for the whole process."""


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
    """The folder that `name` means: an existing folder, or a fetched model; else `name` itself, taken as a hub id.

    The folder may hold a whole model, or an adapter that names its base.
    """
    if (found := model_folder(name)) is not None:
        return str(found)
    folder = Path(name).expanduser()
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    if is_path(name):
        raise ModelError(f"there is no folder {folder}: check the path, or name a model of the hub or of `reroll models fetch`")
    return name


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    head: Head = "language",
    lora: LoraConfig | None = None,
    exact: bool = False,
    train_vision: bool = False,
) -> PreTrainedModel:
    """The decoder `name` with the head asked for and reroll's attention, in eval mode.

    A scalar head that the folder does not hold starts at zero. The folder of an adapter gives its base, with the adapter
    merged into it. `lora` adds a fresh adapter, and freezes the rest. `exact` as in `models.exact`. What a
    model sees with is frozen, unless it is to `train_vision`.
    """
    source = resolve_model(name)
    prepare(f"{source} {dtype}", torch.device(device))
    try:
        with _LOADING, quiet():
            model = _build(source, dtype, head)
            if lora is not None:
                from reroll.models.lora import add_lora

                add_lora(model, lora, base=name)
    except _LOAD_FAILURES as error:
        raise _load_error(name, "model", error) from error
    check_supported(model)
    open_eye(model, name, trains=train_vision)
    if exact:
        make_exact(model)
    mix_packed(model)
    if torch.device(device).type == "cuda":
        fuse(model)
    return model.to(device).eval()  # type: ignore[no-any-return, arg-type]


def stored_dtype(name: str) -> torch.dtype | None:
    """What the model `name` is stored as; None if that is not one for all weights, or not to be seen here.

    Loaded as that, its files are mapped: a large model then takes no memory, until its weights are changed.
    """
    found: set[str] = set()
    try:
        for file in Path(resolve_model(name)).glob("model*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                keys: list[str] = weights.keys()
                found |= {weights.get_slice(key).get_dtype() for key in keys}
    except _LOAD_FAILURES as error:
        raise _load_error(name, "model", error) from error
    return _STORED.get(found.pop()) if len(found) == 1 else None


def context_length(name: str) -> int | None:
    """Tokens that the model `name` takes, prompt and answer together; None if its config does not say."""
    source = resolve_base(name)
    try:
        config = AutoConfig.from_pretrained(source).get_text_config()
    except _LOAD_FAILURES as error:
        raise _load_error(name, "config", error) from error
    return getattr(config, "max_position_embeddings", None)


def skeleton(name: str, *, lora: LoraConfig | None = None) -> PreTrainedModel:
    """The decoder `name` without its weights: parameters have names and shapes, and lie on no device."""
    source = resolve_base(name)
    try:
        with _LOADING, torch.device("meta"):
            model: PreTrainedModel = auto_class(source).from_config(plain_config(source))
            if lora is not None:
                from reroll.models.lora import add_lora

                add_lora(model, lora, base=name)
    except _LOAD_FAILURES as error:
        raise _load_error(name, "model", error) from error
    return model


def _build(source: str, dtype: torch.dtype, head: Head) -> PreTrainedModel:
    base = adapter_base(Path(source))
    if base is not None:
        from reroll.models.lora import merge_adapter

        model = _build(_resolve_base(base, adapter=source), dtype, head)
        merge_adapter(model, source)
        return model
    model = _with_score(source, dtype) if head == "score" else _with_language(source, dtype)
    if head == "language+score":
        add_score_head(model, source)
    return model


def resolve_base(name: str) -> str:
    """As `resolve_model`; of an adapter, or an adapter's adapter, the model underneath."""
    source = resolve_model(name)
    while base := adapter_base(Path(source)):
        source = _resolve_base(base, adapter=source)
    return source


def _resolve_base(base: str, *, adapter: str) -> str:
    try:
        return resolve_model(base)
    except ModelError as error:
        raise ModelError(f"{adapter} is an adapter, and its base is missing: {error}") from error


def _with_language(source: str, dtype: torch.dtype) -> PreTrainedModel:
    return _load(auto_class(source), source, dtype)[0]


def _with_score(source: str, dtype: torch.dtype) -> PreTrainedModel:
    model, has_score = _load(AutoModelForSequenceClassification, source, dtype, num_labels=1)
    if not has_score:
        torch.nn.init.zeros_(score_head(model).weight)
    return model


def _load(auto: Any, source: str, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, bool]:
    """The model, and whether its folder held a scalar head if it has one. Any other missing weight is an error: it would
    be random."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # What it would report about the scalar head is as intended.
    try:
        options |= dequantizing(source)
        model, found = auto.from_pretrained(
            source, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True, **options
        )
    finally:
        logging.set_verbosity(verbosity)
    if "quantization_config" in options:
        forget_quantization(model, dtype)
    is_score = [key.startswith(f"{SCORE}.") for key in found["missing_keys"]]
    if not all(is_score):
        names = sorted(key for key in found["missing_keys"] if not key.startswith(f"{SCORE}."))
        raise ModelError(f"{source} lacks weights of the model it describes: {', '.join(names[:3])}, {len(names)} in all")
    return model, not is_score


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer stored with the model `name`."""
    # Texts are encoded one by one. A pool of threads makes nothing faster then: on 16 cores it took twice the time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    source = resolve_model(name)
    base = adapter_base(Path(source))
    if base is not None and not (Path(source) / "tokenizer_config.json").is_file():
        return load_tokenizer(_resolve_base(base, adapter=source))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except _LOAD_FAILURES as error:
        raise _load_error(name, "tokenizer", error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {name} has no end-of-sequence token: set eos_token in its tokenizer_config.json")
    return tokenizer


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write an ordinary Hugging Face folder: config, safetensors, tokenizer and chat template.

    Of a model with an adapter, the adapter alone is written, as peft does. `weights`: these instead of all, in one file.
    """
    if has_adapter(model):
        from reroll.models.lora import save_adapter

        save_adapter(model, folder)
    else:
        with _LOADING, quiet():
            if weights is None:
                model.save_pretrained(folder)
            else:
                # Else the first rank alone would write.
                model.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[method-assign]
                model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=sys.maxsize)
    tokenizer.save_pretrained(folder)
    if eye := eye_of(model):
        eye.save(folder)


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `lora` was given when the model was loaded."""
    return bool(model._hf_peft_config_loaded)


def without_adapter(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, the model is the one it started from: its adapter, if it has one, is off."""
    if not has_adapter(model):
        return nullcontext()
    from reroll.models.lora import adapter_off

    return adapter_off(model)


def _load_error(name: str, part: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, SafetensorError):
        return ModelError(f"cannot load the {part} {name!r}: its weights are damaged, {reason} (get its files again)")
    return ModelError(
        f"cannot load the {part} {name!r}: {reason} "
        "(name a Hugging Face folder with a causal language model, a hub id while online, or a model of `reroll models fetch`)"
    )


def shared_vocabulary(student: str, teacher: str, *, role: str = "teacher") -> int:
    """How many ids the two share: those of the student's tokenizer, without the padding that heads may have behind them.

    `role` is what the other model is called in the error.
    Raises ModelError unless the teacher has every token of the student under the same id. A teacher may know more.
    """
    wanted = load_tokenizer(student).get_vocab()
    has = wanted if teacher == student else load_tokenizer(teacher).get_vocab()
    differing = sorted((id, token) for token, id in wanted.items() if has.get(token) != id)
    if differing:
        id, token = differing[0]
        found = f"id {has[token]}" if token in has else "no token at all"
        raise ModelError(
            f"the {role} {teacher} and the student {student} do not share a vocabulary: {len(differing)} of "
            f"{len(wanted)} tokens differ, the first is {token!r}, id {id} for the student, {found} for the {role} "
            f"(they are compared token by token: use a {role} of the student's model family)"
        )
    return max(wanted.values()) + 1
