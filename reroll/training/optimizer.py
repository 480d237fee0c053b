"""What strategies share of the optimizer: AdamW as the config has it, its step and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from reroll.config.parts import OptimConfig
from reroll.errors import TrainingDiverged
from reroll.observe.metrics import Last, Max, Stats


def adamw(
    parameters: Iterable[nn.Parameter],
    optim: OptimConfig,
    *,
    ndim_of: Callable[[nn.Parameter], int] = lambda parameter: parameter.ndim,
) -> torch.optim.AdamW:
    """AdamW in which norms and biases do not decay. `ndim_of` tells how many dimensions the whole of a parameter has."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if ndim_of(parameter) > 1 else plain).append(parameter)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True,
    )  # fmt: skip


def prepare_step(optimizer: torch.optim.Optimizer, norm: Tensor, config: OptimConfig, *, step: int, total_steps: int) -> Stats:
    """Clip the gradients, whose norm over all ranks this is, and set the learning rate of this step. Returns both.

    Raises TrainingDiverged, with the gradients forgotten and nothing else changed, if the norm is not finite.
    """
    value = float(norm)  # A GPU is waited for once.
    if not math.isfinite(value):
        optimizer.zero_grad()
        raise diverged(step)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)
    rate = learning_rate(step, config, total_steps=total_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return Stats({"grad_norm": Last(value), "grad_norm_max": Max(value), "lr": Last(rate)})


def diverged(step: int) -> TrainingDiverged:
    """What a strategy raises instead of taking an optimizer step by a gradient that is not finite."""
    return TrainingDiverged(
        f"the gradient of optimizer step {step} is not finite; the weights are those of the step before: "
        "lower policy.optim.lr or clip_norm, or train in fp32, and resume from the last checkpoint"
    )


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
