"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from reroll.config.parts import OptimConfig


def learning_rate(step: int, config: OptimConfig, *, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0).

    It rises linearly over `warmup_steps`, reaching `lr` at the first step after them, then stays or decays so that the
    last of `total_steps` has `lr * min_lr_ratio`; later steps keep that.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min((step - config.warmup_steps) / max(total_steps - 1 - config.warmup_steps, 1), 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
