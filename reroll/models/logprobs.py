"""Log-probs of given tokens from hidden states, in chunks: [tokens x vocabulary] is never held.

Only one chunk of logits lives at a time. The backward pass makes the logits of a chunk again (one extra product with
the head) and turns them into gradients on the spot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from reroll.models import exact, fused
from reroll.models.attention import shape_logits

_BLOCK_NUMBERS = 1 << 20
"""Logits that a CPU works on at a time: 4 MiB in fp32."""


def token_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, positions: Tensor, *, temperature: float | Tensor, chunk: int
) -> Tensor:
    """fp32 log-probs [T] of `targets` [T] under softmax(logits / temperature), 0 outside `positions`; fp64 ones of a model in
    fp64. The temperature is one for all, or [T].

    `hidden` [T, hidden] are the decoder's last states of packed sequences. Token t is predicted by the state before it,
    so `positions` [P] (indices into T) must hold no sequence's first token. Differentiable in `hidden` and the head.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rows = hidden[positions - 1]
    if isinstance(temperature, Tensor):
        temperature = temperature[positions, None]
    with exact.exact_forward(model):
        logp = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            rows, head.weight, head.bias, targets[positions], model, temperature, chunk
        )
    return torch.zeros(len(targets), dtype=logp.dtype, device=hidden.device).index_put((positions,), logp)


class _ChunkedLogprobs(torch.autograd.Function):
    """(hidden [P, H], weight [V, H], bias [V] or None, targets [P]) -> log-probs [P]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        model: PreTrainedModel,
        temperature: float | Tensor,
        chunk: int,
    ) -> Tensor:
        logp = torch.empty(len(targets), dtype=_at_least_fp32(hidden), device=hidden.device)
        normaliser = torch.empty_like(logp)
        raw = None
        for rows in _chunks(len(targets), chunk):
            raw = linear(hidden[rows], weight, bias)
            for some in _blocks(rows, raw):
                shaped = shape_logits(model, raw[_within(some, rows)])
                logp[some], normaliser[some] = _chosen_logprobs(shaped, targets[some], _of(temperature, some))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.model, ctx.temperature, ctx.chunk = model, temperature, chunk
        ctx.last_raw = raw if any(ctx.needs_input_grad) else None  # The one chunk that backward need not make again.
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for rows in reversed(_chunks(len(targets), ctx.chunk)):
            raw = linear(hidden[rows], weight, bias) if ctx.last_raw is None else ctx.last_raw
            ctx.last_raw = None
            grad_raw = raw  # Written over, block by block.
            for some in _blocks(rows, raw):
                part, of = raw[_within(some, rows)], _of(ctx.temperature, some)
                made = _logits_gradient(ctx.model, part, targets[some], normaliser[some], grad[some, None], of)
                if made.data_ptr() != part.data_ptr():  # A kernel has written it in place.
                    part.copy_(made)
            del raw
            torch.mm(grad_raw, weight, out=grad_hidden[rows])
            if ctx.needs_input_grad[1]:  # Not where an adapter is trained: the head is frozen.
                grad_weight = _accumulate(grad_weight, grad_raw.T @ hidden[rows])
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = _accumulate(grad_bias, grad_raw.sum(0))
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """fp32 log-probs of `targets` and the normalisers of all rows."""
    if fused.runs_kernels(logits):
        return fused.kernels().chosen_logprobs(logits, targets, temperature=_row(temperature))
    scaled = _scale(logits, temperature)
    target_logits = scaled.gather(1, targets[:, None]).squeeze(1)
    if exact.is_exact():
        logp = exact.logprobs_of(scaled, targets)
        return logp, target_logits - logp
    peak = scaled.amax(-1)
    normaliser = scaled.sub_(peak[:, None]).exp_().sum(-1).log_().add_(peak)
    return target_logits - normaliser, normaliser


def _logits_gradient(
    model: PreTrainedModel, raw: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, temperature: float | Tensor
) -> Tensor:
    """d(grad · logp) / d(raw logits), in the dtype of the head: grad * (onehot - softmax) / temperature."""
    with torch.enable_grad():
        raw = raw.detach().requires_grad_()
        shaped = shape_logits(model, raw)
    if shaped is raw and fused.runs_kernels(raw):
        logits = raw.detach()
        return fused.kernels().logits_gradient_(logits, targets, normaliser, grad.squeeze(1), temperature=_row(temperature))
    scale = grad / temperature
    logits = _scale(shaped.detach(), temperature)
    grad_shaped = logits.sub_(normaliser[:, None]).exp_().mul_(-scale)
    grad_shaped = grad_shaped.scatter_add_(1, targets[:, None], scale).to(raw.dtype)
    if shaped is raw:
        return grad_shaped
    return torch.autograd.grad(shaped, raw, grad_shaped)[0]


def _scale(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """A fp32 copy of the logits, divided by the temperature: free to be overwritten."""
    logits = logits.to(_at_least_fp32(logits), copy=True)
    return logits if not isinstance(temperature, Tensor) and temperature == 1 else logits.div_(temperature)


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _of(temperature: float | Tensor, rows: slice) -> float | Tensor:
    """The temperature of a chunk: one for all, or [P, 1]."""
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _row(temperature: float | Tensor) -> float | Tensor:
    """A chunk's temperature as the kernels take it: one for all, or [P]."""
    return temperature.squeeze(1) if isinstance(temperature, Tensor) else float(temperature)


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """total + part, in fp32 as soon as there are two parts."""
    if total is None:
        return part
    total = total.to(_at_least_fp32(total))
    fused.add_(total, part)
    return total


def _blocks(rows: slice, raw: Tensor) -> list[slice]:
    """The rows of a chunk in blocks whose fp32 copies stay in a CPU's cache; elsewhere all at once."""
    size = max(1, _BLOCK_NUMBERS // raw.shape[1]) if raw.device.type == "cpu" else len(raw)
    return [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


def _within(some: slice, rows: slice) -> slice:
    return slice(some.start - rows.start, some.stop - rows.start)


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]
