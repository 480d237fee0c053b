"""Checkpoints of quantized weights: read as plain ones, which can be trained, and written as plain ones."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoConfig, FineGrainedFP8Config, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from reroll.errors import ModelError

_READABLE = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
"""What is read: the 4-bit experts of gpt-oss, and matrices of 8-bit floats with a scale for each block."""


def quantization(source: str) -> str | None:
    """The method by which this folder stores its weights; None: plainly."""
    for part in _parts(AutoConfig.from_pretrained(source)):
        if found := getattr(part, "quantization_config", None):
            return str(found["quant_method"])
    return None


def dequantizing(source: str) -> dict[str, Any]:
    """What `from_pretrained` takes beside this folder to read plain weights. Raises ModelError if they cannot be read."""
    method = quantization(source)
    if method is None:
        return {}
    if method not in _READABLE:
        raise ModelError(
            f"{source} stores weights quantized by {method!r}, which cannot be trained: name its original checkpoint "
            f"(read as plain weights are {' and '.join(_READABLE)})"
        )
    if method == "fp8" and version("transformers").startswith("5.16."):
        raise ModelError(
            f"{source} stores weights as fp8, which transformers reads as plain ones since 5.17: pip install -U transformers"
        )
    return {"quantization_config": _READABLE[method](dequantize=True)}


def plain_config(source: str, **options: Any) -> PreTrainedConfig:
    """The config of this folder's model as it is run here: of plain weights."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(source, **options)
    _forget(config)
    return config


def forget_quantization(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make a model that was read as plain weights like one that never was quantized: all in `dtype`, and saved plainly."""
    stay = tuple(model._keep_in_fp32_modules_strict or ())
    for name, weight in model.named_parameters():
        if not any(part in name for part in stay):
            weight.data = weight.data.to(dtype)
    _forget(model.config)
    # What was done to the weights in loading is undone in saving, which would name them as the quantized ones: the conversions
    # of the family itself stand in transformers' own table.
    model._weight_conversions = None  # type: ignore[assignment]


def _parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    return config, config.get_text_config()


def _forget(config: PreTrainedConfig) -> None:
    for part in _parts(config):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
