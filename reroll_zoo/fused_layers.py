"""Operations that Hugging Face writes as many small kernels, as one: on a GPU those cost more than the products between them.

Trainer and engine both run what is fused here, so their log-probs agree. It rounds once where the original rounds at every
step. A module whose source is not the one known here is left alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import MethodType

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from reroll.models.fused import kernels, runs_kernels

_PLAIN_NORM = "return self.weight * hidden_states.to(input_dtype)"
"""How a norm ends that scales by its weight and nothing else. Gemma's, which scales by one more, is left alone."""
_GATED_MLP = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
_ROTATION = "(q * cos) + (rotate_half(q) * sin)"
_ROTATE_NAME = "apply_rotary_pos_emb"
"""The function of a model's source file that turns queries and keys."""

Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: nn.Module) -> None:
    """Make norms, gated layers and rotary embeddings of a model on a GPU one kernel each."""
    fuse_norms(model)
    fuse_gates(model)
    fuse_rotations(model)


def fuse_norms(model: nn.Module) -> int:
    """Make every plain RMS norm of the model one kernel; returns how many there are."""
    return _replace(model, "variance_epsilon", _PLAIN_NORM, fused_norm)


def fuse_gates(model: nn.Module) -> int:
    """Make activation and product of every SwiGLU layer one kernel; returns how many there are."""
    return _replace(model, "gate_proj", _GATED_MLP, fused_gate)


def fuse_rotations(model: nn.Module) -> int:
    """Turn queries and keys by one kernel each; returns in how many source files of the model's layers.

    Layers call the function by its name in their file, so it is replaced there; on other devices it is what it was.
    """
    files = {type(module).__module__ for module in model.modules() if hasattr(module, "q_proj")}
    count = 0
    for file in map(sys.modules.__getitem__, files):
        original: Rotate | None = getattr(file, _ROTATE_NAME, None)
        if isinstance(original, _FusedRotation) or (original is not None and _ROTATION in inspect.getsource(original)):
            setattr(file, _ROTATE_NAME, original if isinstance(original, _FusedRotation) else _FusedRotation(original))
            count += 1
    return count


class _FusedRotation:
    """Rotary embedding of packed queries and keys [1, H, T, D]: our kernel on a GPU, the original elsewhere."""

    def __init__(self, original: Rotate) -> None:
        self._original = original

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not runs_kernels(q) or len(q) > 1 or cos.shape[-1] != q.shape[-1] or unsqueeze_dim != 1:
            return self._original(q, k, cos, sin, unsqueeze_dim)
        rotation = kernels().Rotation
        query, key = (rotation.apply(states.squeeze(0).transpose(0, 1), cos[0], sin[0]) for states in (q, k))
        return query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0)


def _replace(model: nn.Module, attribute: str, source: str, forward: Callable[..., Tensor]) -> int:
    """Give modules with this attribute, whose forward holds this source, another forward."""
    kinds = {type(module) for module in model.modules() if hasattr(module, attribute)}
    known = tuple(kind for kind in kinds if source in inspect.getsource(kind.forward))
    modules = [module for module in model.modules() if isinstance(module, known)] if known else []
    for module in modules:
        module.forward = MethodType(forward, module)
    return len(modules)


def fused_norm(norm: nn.Module, hidden_states: Tensor) -> Tensor:
    """What a norm's forward becomes."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
    if not runs_kernels(hidden_states):
        return rms_norm(hidden_states, weight.shape, weight, epsilon)
    return kernels().RmsNorm.apply(hidden_states, weight, epsilon)  # type: ignore[no-any-return]


def fused_gate(mlp: nn.Module, x: Tensor) -> Tensor:
    """What the forward of a SwiGLU layer becomes."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)  # type: ignore[operator]
    if not runs_kernels(gate) or not is_silu(mlp.act_fn):
        return mlp.down_proj(mlp.act_fn(gate) * up)  # type: ignore[operator, no-any-return]
    return mlp.down_proj(kernels().GatedSilu.apply(gate, up))  # type: ignore[operator, no-any-return]


def is_silu(activation: object) -> bool:
    """Whether the activation is the one that has a kernel."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
