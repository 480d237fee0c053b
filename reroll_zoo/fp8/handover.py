"""Norms and gates that write the codes of their result beside it, for the next product to find: a kernel less each."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from reroll.models.fused import runs_kernels
from reroll_zoo.fused_layers import fused_gate, fused_norm, is_silu

Codes = tuple[Tensor, Tensor]
"""Codes and scales of rows."""


class Handover:
    """The codes that were written last, and the tensor that they are of."""

    def __init__(self) -> None:
        self._rounded: Tensor | None = None
        self._codes: Codes | None = None

    def give(self, rounded: Tensor, codes: Codes) -> None:
        self._rounded, self._codes = rounded, codes

    def take(self, x: Tensor) -> Codes | None:
        """The codes of x, if they are what was given last. They are asked for once."""
        if x is not self._rounded:
            return None
        codes, self._rounded, self._codes = self._codes, None, None
        return codes


def write_codes(model: nn.Module, handover: Handover) -> int:
    """Have the fused norms and gates of the decoder's layers give codes too; returns how many do. A layer's own norms come
    before its products; those inside its attention do not, and stay as they are."""
    layers = [module for module in model.modules() if hasattr(module, "self_attn") and hasattr(module, "mlp")]
    norms = [part for layer in layers for part in layer.children() if _forward_of(part) is fused_norm]
    gates = [part for part in model.modules() if _forward_of(part) is fused_gate and is_silu(part.act_fn)]
    for norm in norms:
        norm.forward = partial(_norm, handover, norm)
    for gate in gates:
        gate.forward = partial(_gate, handover, gate)
    return len(norms) + len(gates)


def _forward_of(module: nn.Module) -> object:
    return getattr(module.forward, "__func__", None)


def _norm(handover: Handover, norm: nn.Module, hidden_states: Tensor) -> Tensor:
    if not runs_kernels(hidden_states):
        return fused_norm(norm, hidden_states)
    from reroll_zoo.fp8.kernels import quantized_norm

    rows = hidden_states.contiguous().view(-1, hidden_states.shape[-1])
    normed, codes = quantized_norm(rows, norm.weight, norm.variance_epsilon)  # type: ignore[arg-type]
    return _given(handover, normed.view(hidden_states.shape), codes)


def _gate(handover: Handover, mlp: nn.Module, x: Tensor) -> Tensor:
    if not runs_kernels(x):
        return fused_gate(mlp, x)
    from reroll_zoo.fp8.kernels import quantized_gate

    gate, up = mlp.gate_proj(x).contiguous(), mlp.up_proj(x).contiguous()  # type: ignore[operator]
    gated, codes = quantized_gate(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
    return mlp.down_proj(_given(handover, gated.view(gate.shape), codes))  # type: ignore[operator, no-any-return]


def _given(handover: Handover, rounded: Tensor, codes: Codes) -> Tensor:
    handover.give(rounded, codes)
    return rounded
