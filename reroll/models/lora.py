"""Low-rank adapters, through peft: put into a model in place, so that everything else runs the same modules.

An adapted layer computes W x + alpha / rank · B A x. W is frozen; A and B learn, and so does a scalar head. B starts at
zero, so a model with a fresh adapter is the model without it. There is no dropout: log-probs must be reproducible.

This file alone imports peft. Whoever may need it imports it inside a function, so that nobody else has to have peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.models.heads import SCORE
from reroll.models.recurrent import weights_taken_past_adapters

WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = "default"
"""What peft calls an adapter that nobody named. It is part of parameter names in memory, not on disk."""

_PREFIX = "base_model.model."
"""In front of every name in an adapter's file."""

_SEEING = r".*\b(visual|vision_model|vision_tower|connector|multi_modal_projector)\b.*"
"""What models see with is never adapted: it stays as it is, so that a picture is looked at once."""

_SEED = 0
"""Seed of the first A matrices: every worker, wherever it runs, starts from the same adapter."""


def add_lora(model: PreTrainedModel, config: LoraConfig, *, base: str) -> None:
    """Freeze the model and give it a fresh adapter to train. Its checkpoints will name `base` as what they belong to."""
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(model, config.targets),
        exclude_modules=_SEEING if getattr(model.config, "vision_config", None) is not None else None,
        task_type="SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM",  # type: ignore[no-untyped-call]
    )
    model.add_adapter(settings)
    settings.base_model_name_or_path = base  # After peft has put there what it knows.
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if name.startswith(f"{SCORE}."):
            parameter.requires_grad_(True)
            settings.modules_to_save = [SCORE]
        elif f".lora_A.{_NAME}." in name:
            # What peft does, but not from the generator that all threads of this process share.
            start = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
            parameter.data.copy_(start)


def _targets(model: PreTrainedModel, wanted: list[str] | str) -> list[str]:
    """The layers to adapt, as peft takes them: ends of dotted names. Heads are never among them.

    Nor are those whose weight a kernel may take past an adapter, nor experts, nor any MLP beside them: transformers would take
    that for a wish to adapt the experts.
    """
    modules = {name: module for name, module in model.base_model.named_modules() if not re.fullmatch(_SEEING, name)}
    has_experts = any(name.endswith(".experts") for name in modules)
    past_adapters = weights_taken_past_adapters(model.base_model)
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module not in past_adapters]
    linears = [name for name in linears if not (has_experts and ".mlp." in name)]
    known = sorted({name.rpartition(".")[2] for name in linears})
    if isinstance(wanted, str):
        return known
    unknown = [target for target in wanted if not any(f".{name}".endswith(f".{target}") for name in linears)]
    if unknown or not wanted:
        raise ModelError(
            f"lora.targets {unknown} name no linear layer inside this model: choose among {', '.join(known)}, or all-linear"
        )
    return wanted


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is the one it started from."""
    # Not peft's own switch, which also freezes the adapter: a sharded model remembers what was frozen when it first ran.
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write what is trained as an ordinary peft folder."""
    model.peft_config[_NAME].save_pretrained(str(folder))
    tensors = {_name_on_disk(name): tensor.detach().contiguous() for name, tensor in _trained(model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """What `save_adapter` wrote for a model like this one, by parameter name."""
    file, trained = folder / WEIGHTS_FILE, _trained(model)
    saved = load_file(file) if file.is_file() else {}
    found = {name: saved[key] for name in trained if (key := _name_on_disk(name)) in saved}
    if {name: tensor.shape for name, tensor in found.items()} != {name: tensor.shape for name, tensor in trained.items()}:
        raise ModelError(f"{folder} does not hold this model's adapter: go on with the lora settings that wrote it")
    return found


def merge_adapter(model: PreTrainedModel, folder: str) -> None:
    """Add the adapter saved in a peft folder to the weights of its base, all of which can then be trained.

    A saved scalar head replaces the model's, if that has one.
    """
    settings = peft.PeftConfig.from_pretrained(folder)
    settings.task_type = None  # So that an adapter learned under one head also serves a model with another.
    heads = [name for name in settings.modules_to_save or () if hasattr(model, name)]
    settings.modules_to_save = heads or None
    adapted = peft.PeftModel.from_pretrained(model, folder, config=settings, torch_device="cpu", autocast_adapter_dtype=False)
    adapted.merge_and_unload()
    model.requires_grad_(True)


def _trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _name_on_disk(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")
