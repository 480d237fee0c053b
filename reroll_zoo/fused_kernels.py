"""Triton kernels for what training computes between matrix products: each reads its input once and writes its output once.

All compute in fp32 and round once, whatever the dtype of their tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from reroll_zoo.kernel_cache import kernel_cache

_BLOCK = 1024
_NORM_TILE = 4096
"""Numbers that a program of a norm works on at once: one wide row, or many narrow ones."""
_MAX_NORM_PROGRAMS = 528
"""Four for each processor of an H200: each sums the gradient of the weight over its rows."""
_VARYING = ["num_rows"]
"""Another number in every micro-batch: one kernel serves all. Else the first that 16 divides would wait for one of its own."""


def prepare(model: str, device: torch.device) -> None:
    """Begin to get ready, beside what this process does, the kernels that this model needed before."""
    kernel_cache().fetch(model, device)


class Rotation(torch.autograd.Function):
    """Rotary embedding: (states [T, H, D], cos [T, D], sin [T, D]) -> [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(states, cos, sin, direction=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, direction=-1.0), None, None  # A rotation's gradient is turned back.


class RmsNorm(torch.autograd.Function):
    """(states [..., C], weight [C], epsilon) -> states over their root mean square, times weight. Keeps a number per row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = states.contiguous().view(-1, states.shape[-1])
        output = torch.empty_like(rows)
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        shape = _norm_tile(rows.shape[1])
        _rms_norm[(triton.cdiv(len(rows), shape["ROWS"]),)](output, scales, rows, weight, epsilon, *rows.shape, **shape)
        ctx.save_for_backward(rows, weight, scales)
        return output.view(states.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        grad_rows, shape = grad.contiguous().view_as(rows), _norm_tile(rows.shape[1])
        grad_states = torch.empty_like(rows)
        num_programs = min(_MAX_NORM_PROGRAMS, triton.cdiv(len(rows), shape["ROWS"]))
        grad_weights = torch.empty((num_programs, rows.shape[1]), dtype=torch.float32, device=rows.device)
        _rms_norm_backward[(num_programs,)](
            grad_states, grad_weights, grad_rows, rows, weight, scales, *rows.shape, NUM_PROGRAMS=num_programs, **shape
        )
        return grad_states.view(grad.shape), grad_weights.sum(0).to(weight.dtype), None


class GatedSilu(torch.autograd.Function):
    """(gate, up) -> silu(gate) * up, elementwise. Keeps nothing but its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        output = torch.empty_like(gate)
        _gated_silu[(triton.cdiv(gate.numel(), _BLOCK),)](output, gate, up, gate.numel(), BLOCK=_BLOCK)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad, grad_gate, grad_up = grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _gated_silu_backward[(triton.cdiv(gate.numel(), _BLOCK),)](
            grad_gate, grad_up, grad, gate, up, gate.numel(), BLOCK=_BLOCK
        )
        return grad_gate, grad_up


class Spread(torch.autograd.Function):
    """(values [U, H, D], copies, index [T], order [T], bounds [U + 1]) -> values[index] with `copies` of each head.

    `order[bounds[u]:bounds[u + 1]]` are the places where `index` is u: the gradient of a row is the sum over them and over the
    copies, always in the same order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: int, index: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(order, bounds)
        ctx.copies = copies
        _, num_heads, dim = values.shape
        whole = torch.empty((len(index), num_heads * copies, dim), dtype=values.dtype, device=values.device)
        width = num_heads * copies * dim
        grid = (len(index), triton.cdiv(width, _BLOCK))
        _spread_rows[grid](whole, values.contiguous(), index, width, DIM=dim, COPIES=copies, BLOCK=_BLOCK)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        order, bounds = ctx.saved_tensors
        _, num_heads, dim = grad.shape
        summed = torch.empty((len(bounds) - 1, num_heads // ctx.copies, dim), dtype=grad.dtype, device=grad.device)
        width = num_heads // ctx.copies * dim
        grid = (len(summed), triton.cdiv(width, _BLOCK))
        _sum_rows[grid](summed, grad.contiguous(), order, bounds, width, DIM=dim, COPIES=ctx.copies, BLOCK=_BLOCK)
        return summed, None, None, None, None


def add_(total: Tensor, part: Tensor) -> None:
    """total += part: into fp32, of any type. Both are contiguous."""
    _add[(triton.cdiv(total.numel(), 4 * _BLOCK),)](total, part, total.numel(), BLOCK=4 * _BLOCK)


def chosen_logprobs(logits: Tensor, targets: Tensor, *, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """fp32 log-probs [P] of `targets` [P] under softmax(logits [P, V] / temperature), and the normalisers [P].

    The temperature is one for all, or [P].
    """
    num_rows, vocabulary = logits.shape
    logp = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    normaliser = torch.empty_like(logp)
    _chosen_logprobs[(num_rows,)](
        logp, normaliser, logits, targets, _cooled(temperature, logp), vocabulary, logits.stride(0), BLOCK=4096, num_warps=8
    )
    return logp, normaliser


def logits_gradient_(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, *, temperature: float | Tensor
) -> Tensor:
    """Turn logits [P, V] into the gradient of `grad` [P] · `chosen_logprobs`, in place."""
    num_rows, vocabulary = logits.shape
    block = 4096
    _logits_gradient[(num_rows, triton.cdiv(vocabulary, block))](
        logits,
        targets,
        normaliser,
        grad,
        _cooled(temperature, normaliser),
        vocabulary,
        logits.stride(0),
        BLOCK=block,
        num_warps=8,
    )
    return logits


def _norm_tile(num_columns: int) -> dict[str, int]:
    """How many rows of this width a program takes at once."""
    width = triton.next_power_of_2(num_columns)
    return {"ROWS": max(1, _NORM_TILE // width), "BLOCK": width}


def _cooled(temperature: float | Tensor, like: Tensor) -> Tensor:
    """1 / temperature of every row, rounded in the same way whether it is one for all or not."""
    return 1 / (torch.full_like(like, temperature) if isinstance(temperature, float) else temperature.float())


def _rotated(states: Tensor, cos: Tensor, sin: Tensor, *, direction: float) -> Tensor:
    num_tokens, num_heads, dim = states.shape
    if states.stride(2) != 1:
        states = states.contiguous()
    output = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _rotate[(num_tokens,)](
        output,
        states,
        cos.contiguous(),
        sin.contiguous(),
        states.stride(0),
        states.stride(1),
        direction,
        NUM_HEADS=num_heads,
        HALF=dim // 2,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(dim // 2),
    )
    return output


@triton.jit
def _rotate(
    output,
    states,
    cos,
    sin,
    token_stride,
    head_stride,
    direction,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    is_real = (heads < NUM_HEADS) & (dims < HALF)
    # The two halves turn by the same angles.
    across = tl.load(cos + token * 2 * HALF + dims, mask=dims < HALF).to(tl.float32)
    along = tl.load(sin + token * 2 * HALF + dims, mask=dims < HALF).to(tl.float32) * direction
    source = states + token * token_stride + heads * head_stride + dims
    low = tl.load(source, mask=is_real).to(tl.float32)
    high = tl.load(source + HALF, mask=is_real).to(tl.float32)
    target = output + (token * NUM_HEADS + heads) * 2 * HALF + dims
    tl.store(target, (low * across - high * along).to(output.dtype.element_ty), mask=is_real)
    tl.store(target + HALF, (high * across + low * along).to(output.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=_VARYING)
def _rms_norm(output, scales, states, weight, epsilon, num_rows, num_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(states + places, mask=is_real, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / num_columns + epsilon)
    tl.store(scales + rows, scale, mask=rows < num_rows)
    tl.store(output + places, (x * scale[:, None] * w[None, :]).to(output.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=_VARYING)
def _rms_norm_backward(
    grad_states,
    grad_weights,
    grad,
    states,
    weight,
    scales,
    num_rows,
    num_columns,
    NUM_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    w = tl.load(weight + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(program * ROWS, num_rows, NUM_PROGRAMS * ROWS):
        rows = first + tl.arange(0, ROWS)
        is_real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        places = rows[:, None] * num_columns + columns[None, :]
        d = tl.load(grad + places, mask=is_real, other=0.0).to(tl.float32)
        scale = tl.load(scales + rows, mask=rows < num_rows, other=0.0)
        unit = tl.load(states + places, mask=is_real, other=0.0).to(tl.float32) * scale[:, None]
        total += tl.sum(d * unit, 0)
        d = d * w[None, :]
        along = tl.sum(d * unit, 1) / num_columns
        tl.store(
            grad_states + places,
            ((d - unit * along[:, None]) * scale[:, None]).to(grad_states.dtype.element_ty),
            mask=is_real,
        )
    tl.store(grad_weights + program * num_columns + columns, total, mask=columns < num_columns)


@triton.jit
def _add(total, part, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = places < size
    added = tl.load(part + places, mask=is_real).to(tl.float32)
    tl.store(total + places, tl.load(total + places, mask=is_real) + added, mask=is_real)


@triton.jit
def _gated_silu(output, gate, up, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = places < size
    g = tl.load(gate + places, mask=is_real).to(tl.float32)
    u = tl.load(up + places, mask=is_real).to(tl.float32)
    tl.store(output + places, (g * tl.sigmoid(g) * u).to(output.dtype.element_ty), mask=is_real)


@triton.jit
def _gated_silu_backward(grad_gate, grad_up, grad, gate, up, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = places < size
    d = tl.load(grad + places, mask=is_real).to(tl.float32)
    g = tl.load(gate + places, mask=is_real).to(tl.float32)
    u = tl.load(up + places, mask=is_real).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + places, (d * u * s * (1.0 + g * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=is_real)
    tl.store(grad_up + places, (d * g * s).to(grad_up.dtype.element_ty), mask=is_real)


@triton.jit
def _spread_rows(output, rows, index, width, DIM: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < width
    source = tl.load(index + place).to(tl.int64) * (width // COPIES) + columns // (COPIES * DIM) * DIM + columns % DIM
    tl.store(output + place * width + columns, tl.load(rows + source, mask=is_real), mask=is_real)


@triton.jit
def _sum_rows(output, rows, order, bounds, width, DIM: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < width
    first_copy = columns // DIM * (COPIES * DIM) + columns % DIM
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        source = rows + tl.load(order + place).to(tl.int64) * (COPIES * width) + first_copy
        for copy in range(COPIES):
            total += tl.load(source + copy * DIM, mask=is_real, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, total.to(output.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize_on_alignment=["targets"])
def _chosen_logprobs(logp, normaliser, logits, targets, coolness, vocabulary, row_stride, BLOCK: tl.constexpr):
    LOWEST: tl.constexpr = -1.0e30
    row = tl.program_id(0).to(tl.int64)
    cool = tl.load(coolness + row)
    highest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + row * row_stride + columns, mask=columns < vocabulary, other=LOWEST).to(tl.float32)
        scores = tl.where(columns < vocabulary, scores * cool, LOWEST)
        higher = tl.maximum(highest, tl.max(scores, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(scores - higher), 0)
        highest = higher
    size = highest + tl.log(total)
    chosen = tl.load(logits + row * row_stride + tl.load(targets + row)).to(tl.float32) * cool
    tl.store(normaliser + row, size)
    tl.store(logp + row, chosen - size)


@triton.jit
def _logits_gradient(logits, targets, normaliser, grad, coolness, vocabulary, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < vocabulary
    cool = tl.load(coolness + row)
    scale = tl.load(grad + row) * cool
    source = logits + row * row_stride + columns
    scores = tl.load(source, mask=is_real, other=0.0).to(tl.float32) * cool
    probability = tl.exp(scores - tl.load(normaliser + row))
    is_target = columns == tl.load(targets + row)
    tl.store(source, (scale * (tl.where(is_target, 1.0, 0.0) - probability)).to(logits.dtype.element_ty), mask=is_real)
