"""Kernels that trainer and engine both run on a GPU, each in the place of several operations of PyTorch's."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from reroll.config.registry import load_entry


def fuse(model: nn.Module) -> None:
    """Have a model on a GPU run fused layers in the place of Hugging Face's, where it has layers that can be: what the entry
    point `layers` of the group `reroll.kernels` does. Calling it again changes nothing."""
    if fuse_layers := load_entry("reroll.kernels", "layers"):
        fuse_layers(model)


def prepare(model: str, device: torch.device) -> None:
    """Begin to get ready what kernels this model needs on a GPU, while it is read."""
    if device.type == "cuda" and kernels() is not None:
        kernels().prepare(model, device)


def add_(total: Tensor, part: Tensor) -> None:
    """total += part, where they may differ in type."""
    if not runs_kernels(total) or not (total.is_contiguous() and part.is_contiguous()):
        total += part
        return
    kernels().add_(total, part)


class FusedKernels(Protocol):
    """The kernels, in fp32 whatever the dtype of their tensors, rounded once. The first four are differentiable: called by
    `X.apply(…)`."""

    Rotation: Any
    """(states [T, H, D], cos [T, D], sin [T, D]) -> [T, H, D]."""
    RmsNorm: Any
    """(states [..., C], weight [C], epsilon) -> [..., C]."""
    GatedSilu: Any
    """(gate, up) -> silu(gate) * up."""
    Spread: Any
    """(values [U, H, D], copies, index [T], order [T], bounds [U + 1]) -> values[index] with `copies` of each head."""

    def prepare(self, model: str, device: torch.device) -> None:
        """Begin to get ready, beside what this process does, the kernels that this model needed before."""

    def add_(self, total: Tensor, part: Tensor) -> None:
        """total += part."""

    def chosen_logprobs(self, logits: Tensor, targets: Tensor, *, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """fp32 log-probs [P] of `targets` [P] under softmax(logits [P, V] / temperature), and the normalisers [P]."""

    def logits_gradient_(
        self, logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, *, temperature: float | Tensor
    ) -> Tensor:
        """The gradient of the logits, given that of the log-probs; written over the logits."""


def runs_kernels(tensor: Tensor) -> bool:
    """Whether there are kernels for where this tensor is."""
    return tensor.is_cuda and kernels() is not None


@cache
def kernels() -> FusedKernels | Any:
    """What the entry point `cuda` of the group `reroll.kernels` names; None if nothing does. Imports triton, which CPU builds
    of PyTorch lack."""
    return load_entry("reroll.kernels", "cuda")
