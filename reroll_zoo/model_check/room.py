"""Whether memory holds what the comparison needs, and a smaller model of the same kind where it does not."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from reroll.errors import ModelError
from reroll.models.load import load_tokenizer, skeleton

BYTES_PER_PARAMETER = 32
"""Two models in fp32, each with its gradients and AdamW's two moments."""


def check_room(name: str, device: str = "cpu") -> None:
    """Raises ModelError if there is no such device, or its memory is too small to check the model."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError(f"--device {device}: PyTorch finds no GPU here; leave it out to check on the CPU")
    needed = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in skeleton(name).parameters())
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device != "cpu":
        room = torch.cuda.mem_get_info(device)[0]
    if needed > room:
        raise ModelError(
            f"checking {name} takes {needed / 2**30:.0f} GiB and {'this machine' if device == 'cpu' else device} has "
            f"{room / 2**30:.0f}: "
            "check a random model of its config with --layers 2"
        )


def shortened(name: str, folder: Path, *, num_layers: int) -> str:
    """A folder with a random model of the config of `name`, but with so many layers."""
    config = skeleton(name).config
    text = config.get_text_config()
    if num_layers > text.num_hidden_layers:
        raise ModelError(f"{name} has {text.num_hidden_layers} layers: give --layers up to that, or leave it out")
    text.num_hidden_layers = num_layers
    if (kinds := getattr(text, "layer_types", None)) is not None:
        text.layer_types = kinds[:num_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    load_tokenizer(name).save_pretrained(folder)
    return str(folder)
