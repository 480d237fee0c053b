"""The deepspeed strategy of one rank. Loads DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import OptimConfig
from reroll.training.base import Strategy
from reroll_zoo.deepspeed.config import DeepspeedConfig


def make_deepspeed(
    make_empty: Callable[[], PreTrainedModel],
    read: Callable[..., PreTrainedModel | None],
    tokenizer: PreTrainedTokenizerBase,
    config: DeepspeedConfig,
    optim: OptimConfig,
    *,
    device: str,
    total_steps: int,
) -> Strategy:
    """The first rank reads the model, and DeepSpeed deals it out."""
    os.environ["DS_ACCELERATOR"] = torch.device(device).type  # Else it guesses when it is imported, aloud.
    from reroll_zoo.deepspeed.strategy import DeepspeedStrategy

    return DeepspeedStrategy(make_empty, read(), tokenizer, config, optim, device=device, total_steps=total_steps)
