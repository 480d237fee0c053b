"""Ragged packed inputs for the loss tests, and options that make every bound of every loss bite."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reroll.algo.losses import Tokens
from reroll.config.formula import find_function
from reroll.config.losses import LossConfig

Arrays = dict[str, NDArray[Any]]

LOSSES = {kind: find_function(LossConfig.group, kind) for kind in LossConfig.kinds() if kind != "import"}
"""The functions of all kinds that are registered."""

OPTIONS: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "ppo": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
    "gspo": {"clip_low": 0.03, "clip_high": 0.05},
    "gspo_token": {"clip_low": 0.03, "clip_high": 0.05},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "topr": {},
    "sapo": {"tau_positive": 1.0, "tau_negative": 2.5},
    "kimi": {"tau": 0.3},
    "dro": {"beta": 0.7},
    "dppo_tv": {"max_divergence": 0.05, "max_divergence_low": 0.1, "max_ratio": 1.3},
    "dppo_kl": {"max_divergence": 0.01, "max_divergence_low": 0.02, "max_ratio": 1.3},
    "clip_cov": {"clip_low": 0.1, "clip_high": 0.3},
    "kl_cov": {"coef": 0.6},
}

LENGTHS = [4, 9, 3, 1, 7, 12]
"""The third sequence has nothing in the loss; the fourth is one token."""


def ragged(seed: int, *, one_advantage_a_sequence: bool = False) -> Arrays:
    rng = np.random.default_rng(seed)
    total, sequence = sum(LENGTHS), np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    logp = -rng.exponential(1.0, total) - 0.05
    advantage = rng.normal(size=len(LENGTHS))[sequence] if one_advantage_a_sequence else rng.normal(size=total)
    mask = rng.random(total) < 0.7
    mask[sequence == 2], mask[sequence == 3] = False, True
    mask[np.searchsorted(sequence, [0, 1, 4, 5])] = [False, True, True, True]
    return {
        "logp": logp,
        "old_logp": np.minimum(logp + rng.normal(0, 0.4, total), -0.01),
        "advantage": advantage,
        "mask": mask,
        "sequence": sequence,
        "selected": rng.random(total) < 0.3,
    }


def tokens(arrays: Arrays) -> tuple[Tokens, torch.Tensor]:
    """The view that a loss gets, and the leaf that its gradient ends in."""
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    leaf = tensors["logp"].requires_grad_()
    return Tokens(**tensors), leaf


def loss_and_gradient(kind: str, arrays: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
    """Per-token values on the mask (0 elsewhere), and the gradient of their sum. [T], [T]"""
    t, leaf = tokens(arrays)
    kept = torch.where(t.mask, LOSSES[kind](t, **OPTIONS[kind]), 0.0)
    return kept.detach().numpy(), torch.autograd.grad(kept.sum(), leaf)[0].numpy()


def sequences(arrays: Arrays) -> list[Arrays]:
    """The tokens in the loss, sequence by sequence."""
    kept = [arrays["mask"] & (arrays["sequence"] == index) for index in range(len(LENGTHS))]
    return [{name: value[rows] for name, value in arrays.items()} for rows in kept]
