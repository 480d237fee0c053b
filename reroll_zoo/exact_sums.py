"""Sums in an order that does not depend on what is added up beside them: the arithmetic of `policy.exact`.

How a library adds up depends on how much there is to add: on the rows of a product, on the keys of an attention, on where a
vector instruction ends. Here none of this does. On a CPU rows of a product come in multiples of a number for which this machine
was seen to add up alike, or one tile at a time. A query looks at blocks of `BLOCK` keys, which begin at multiples of that in
its sequence, and sums over them in order. Activations are put together from operations that round every element alike. On a GPU
products and sums of rows are Triton's (`exact_kernels`), and all attention is that of the engine's pages (`exact_attention`).
Forward passes only: gradients are those of the quick ways.

All of it hangs on one seam: torch tells a mode of every function that a model calls, and the mode has others for a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from reroll.errors import ModelError
from reroll.models import fused
from reroll.models.attention import Scoring

TILE = 16
"""Rows of a product where the sums of a row depend on how many rows there are. Fewer are filled up with zeros."""

ROW_STEPS = (1, 4, TILE)
"""What numbers of rows are tried to be multiples of."""

BLOCK = 64
"""Keys that are looked at together."""

_ROWS = 4
"""Queries that look at the same keys come in multiples of this: a product of fewer adds up in another way."""

_QUERIES = 128
"""Places of a sequence that ask together: they look at no key behind the last of them, and bound the memory of the scores."""

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 64)
"""How many times a number of rows is tried."""

_MOST_TRIED = 64
"""Rows up to which a packed product is compared with the plain one."""


def exact_functions() -> TorchFunctionMode:
    """A context for forward passes."""
    return _ExactFunctions()


class _ExactFunctions(TorchFunctionMode):
    """Has another way for the functions that add up or round by how much they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _WAYS.get(func, func)(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]"""
    rows = x.reshape(-1, x.shape[-1])
    product: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], len(weight))


def _matmul(x: Tensor, other: Tensor) -> Tensor:
    """Sums of one term have no order, and a product with one matrix is `linear`. For others there is no way on a GPU."""
    if not fused.runs_kernels(x) or x.shape[-1] == 1:
        return torch.matmul(x, other)
    if other.ndim != 2:
        raise _refusal("products of many matrices")
    return linear(x, other.T)


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"policy.exact: on a GPU there is no fixed order of sums for {what}, which this model takes: leave it out"
    )


def _only_on_a_cpu(function: Callable[..., Tensor], x: Any, *args: Any, **options: Any) -> Tensor:
    if fused.runs_kernels(args[0] if isinstance(x, str) else x):
        raise _refusal(function.__name__)
    return function(x, *args, **options)


def _reduced(function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """A sum or mean: on a GPU, that of each row by a kernel of its own."""
    dim = args[0] if args else options.get("dim")
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if not fused.runs_kernels(x) or not x.is_floating_point() or dims not in ((-1,), (x.ndim - 1,)):
        return function(x, *args, **options)
    keeps = bool(args[1] if len(args) > 1 else options.get("keepdim"))
    wide = x if options.get("dtype") is None else x.to(options["dtype"])
    is_mean = function.__name__ == "mean"

    def summed(rows: Tensor) -> Tensor:
        sums: Tensor = gpu_kernels().sum_rows(rows.reshape(-1, rows.shape[-1]), is_mean=is_mean)
        return sums.view(*rows.shape[:-1], *([1] if keeps else []))

    return with_gradient_of(partial(function, dim=-1, keepdim=keeps), summed, wide)


def gpu_kernels() -> Any:
    """Imports triton, which CPU builds of PyTorch lack."""
    from reroll_zoo import exact_kernels

    return exact_kernels


def packed_attention(query_bounds: Tensor, key_bounds: Tensor, index: Tensor | None) -> Any:
    """See `ExactArithmetic.packed_attention`."""
    from reroll_zoo.exact_attention import PackedPages

    return PackedPages(query_bounds, key_bounds, index)


class _Linear(torch.autograd.Function):
    """(x [T, K], weight [N, K], bias [N] or None) -> [T, N]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            grad @ weight if needs[0] else None,
            grad.T @ x if needs[1] else None,
            grad.sum(0) if needs[2] else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product; on a CPU in rows that come in multiples of what `_row_step` says."""
    if fused.runs_kernels(x):
        return gpu_kernels().product(x, weight, bias)  # type: ignore[no-any-return]
    step, num_rows = _row_step(*weight.shape, weight.dtype, bias is not None, torch.get_num_threads()), len(x)
    spare = -num_rows % (step or TILE)
    filled = functional.pad(x, (0, 0, 0, spare)) if spare else x
    if step:
        product = functional.linear(filled, weight, bias)
    else:
        product = torch.cat([functional.linear(tile, weight, bias) for tile in torch.split(filled, TILE)])
    return product[:num_rows] if spare else product


@cache
def _row_step(num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool, num_threads: int) -> int:
    """The least number of rows, of whose multiples this machine adds up all in the same way; 0: a tile by itself is the only
    one. Tried once for each kind of product."""
    x, weight = telling_product(num_outputs, num_inputs, dtype)
    bias = weight[:, 0].contiguous() if has_bias else None
    whole, tile = functional.linear(x, weight, bias), functional.linear(x[:TILE], weight, bias)
    if not torch.equal(functional.linear(x[:TILE].flip(0), weight, bias).flip(0), tile):
        raise ModelError(
            f"on this machine the rows of a product with a weight of {num_outputs} x {num_inputs} in {dtype} depend on their "
            "place, so trainer and engine cannot be equal to the bit: set policy.exact to false"
        )
    same = torch.equal(whole[:TILE], tile)
    for step in ROW_STEPS:
        sizes = [count * step for count in _COUNTS]
        if same and all(torch.equal(functional.linear(x[:size], weight, bias), whole[:size]) for size in sizes):
            return step
    return 0


def telling_product(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [T, K] and a weight [N, K] whose product is what rounding has left of large terms that cancel: one that adds up in
    another order shows, even where the result is rounded to few bits."""
    generator = torch.Generator().manual_seed(0)
    half = -(-num_inputs // 2)
    x = torch.randn(max(_COUNTS) * TILE, half, generator=generator)
    weight = torch.randn(num_outputs, half, generator=generator)
    order = torch.randperm(2 * half, generator=generator)
    x, weight = torch.cat((x, -x), 1)[:, order], torch.cat((weight, weight), 1)[:, order]
    return x[:, :num_inputs].to(dtype).contiguous(), weight[:, :num_inputs].to(dtype).contiguous()


@cache
def packed_row_step(
    product_of: Callable[[Sequence[nn.Linear]], Callable[[Tensor], Tensor]],
    sizes: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> int:
    """The least number of rows of whose multiples the product of layers like these is that of `linear`. 0: of none."""
    rows, weight = telling_product(sum(sizes), num_inputs, dtype)
    layers = []
    for part in torch.split(weight, list(sizes)):
        layer = nn.Linear(num_inputs, len(part), bias=has_bias, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(part, requires_grad=False)
        if has_bias:
            layer.bias = nn.Parameter(part[:, 0].contiguous(), requires_grad=False)
        layers.append(layer)
    product = product_of(layers)
    plain = torch.cat([linear(rows[:_MOST_TRIED], layer.weight, layer.bias) for layer in layers], -1)
    for step in ROW_STEPS:
        if all(torch.equal(product(rows[:num]), plain[:num]) for num in range(step, _MOST_TRIED + 1, step)):
            return step
    return 0


class _ExactForward(torch.autograd.Function):
    """The value of one function with the gradient of another, both of the same tensors."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], quick: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.quick = quick
        ctx.save_for_backward(*tensors)
        return exact(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            value = ctx.quick(*tensors)
        grads = iter(torch.autograd.grad(value, [tensor for tensor in tensors if tensor.requires_grad], grad))
        return (None, None, *(next(grads) if need else None for need in needs))


def with_gradient_of(quick: Callable[..., Tensor], exact: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`exact(*tensors)`, which is differentiated as if it were `quick(*tensors)`."""
    if not torch.is_grad_enabled():
        return exact(*tensors)
    return _ExactForward.apply(exact, quick, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return functional.silu(x) if fused.runs_kernels(x) else with_gradient_of(functional.silu, _silu_value, x)


def _silu_value(x: Tensor) -> Tensor:
    wide = x.float()
    below = wide.neg().exp_().add_(1)
    return (wide / below).to(x.dtype)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    value, quick = (
        _gelu_tanh_value if approximate == "tanh" else _gelu_erf_value,
        partial(functional.gelu, approximate=approximate),
    )
    return quick(x) if fused.runs_kernels(x) else with_gradient_of(quick, value, x)


def _gelu_tanh_value(x: Tensor) -> Tensor:
    wide = x.float()
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def _gelu_erf_value(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, quick: Callable[..., Tensor]) -> Tensor:
    """Causal attention of right-padded rows [N, heads, L, D], with the gradient of `quick`."""
    sinks = () if scoring.sinks is None else (scoring.sinks,)

    def with_sinks(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, *sinks: way(q, k, v, replace(scoring, sinks=sinks[0] if sinks else None))

    return with_gradient_of(with_sinks(quick), with_sinks(_attend_causal), query, key, value, *sinks)


def _attend_causal(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    num, heads, length, dim = query.shape
    num_kv = key.shape[1]
    places = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        rows = query[:, :, start:end].reshape(num, num_kv, -1, dim)  # Heads that share a key are rows of one query.
        behind = places[start:end, None] - places[None, :end]
        visible = (behind >= 0) & (behind < (scoring.sliding_window or length))
        mask = visible.repeat(heads // num_kv, 1)[None, None]
        sinks = None
        if scoring.sinks is not None:
            sinks = scoring.sinks.view(num_kv, -1).repeat_interleave(end - start, 1)[..., None]
        part = attend(rows, key[:, :, :end], value[:, :, :end], mask, scoring, sinks)
        parts.append(part.reshape(num, heads, end - start, dim))
    return torch.cat(parts, 2)


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scoring: Scoring, sinks: Tensor | None) -> Tensor:
    """query [N, H, R, D], keys and values [N, H, L, D], visible [N or 1, H or 1, R or 1, L]: what each of the rows looks at.

    `sinks` [H, R, 1] are those of the scoring, by row of the query. Places that nobody sees, of which there may be any number
    at the end, add zeros.
    """
    _try_attention(query.shape[3], torch.get_num_threads())
    given, spare = query.shape[2], -keys.shape[2] % BLOCK
    if spare:
        keys, values = (functional.pad(each, (0, 0, 0, spare)) for each in (keys, values))
        visible = functional.pad(visible, (0, spare))
    if given % _ROWS:
        query = functional.pad(query, (0, 0, 0, -given % _ROWS))
        visible = visible if visible.shape[2] == 1 else functional.pad(visible, (0, 0, 0, -given % _ROWS), value=True)
        sinks = None if sinks is None else functional.pad(sinks, (0, 0, 0, -given % _ROWS))
    num, heads, num_rows, dim = query.shape
    rows = query.float().reshape(num * heads, num_rows, dim)
    blocks = range(0, keys.shape[2], BLOCK)
    scores = rows.new_empty(len(blocks), num * heads, num_rows, BLOCK)
    for score, start in zip(scores, blocks, strict=True):
        here = keys[:, :, start : start + BLOCK].float().flatten(0, 1)
        torch.bmm(rows, here.transpose(1, 2), out=score)
    scores.mul_(scoring.scaling)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    by_block = visible.view(*visible.shape[:3], -1, BLOCK).permute(3, 0, 1, 2, 4)  # [blocks, N, H, R, BLOCK]
    scores.view(len(blocks), num, heads, num_rows, BLOCK).masked_fill_(~by_block, float("-inf"))
    peak = scores.amax((0, 3))
    if sinks is not None:
        sink = sinks.float().squeeze(2).expand(num, heads, num_rows).reshape(num * heads, num_rows)
        peak = torch.maximum(peak, sink)
    scores.sub_(peak[:, :, None]).exp_()
    total = (sink - peak).exp_() if sinks is not None else torch.zeros_like(peak)
    mixed = torch.zeros_like(rows)
    for score, start in zip(scores, blocks, strict=True):
        total += score.sum(-1)
        mixed += torch.bmm(score, values[:, :, start : start + BLOCK].float().flatten(0, 1))
    return (mixed / total[:, :, None]).to(query.dtype).view(query.shape)[:, :, :given]


@cache
def _try_attention(dim: int, num_threads: int) -> None:
    """Raise ModelError if on this machine the two products of attention depend on how many rows or contexts there are."""
    for num_inputs, num_outputs in ((dim, BLOCK), (BLOCK, dim)):
        x, weight = telling_product(num_outputs, num_inputs, torch.float32)
        rows = x[: 12 * 8 * _ROWS].view(12, 8 * _ROWS, num_inputs)
        keys = weight.T.contiguous().expand(12, -1, -1)
        whole = torch.bmm(rows, keys)
        sizes = [(contexts, count * _ROWS) for contexts in (1, 2, 3, 12) for count in range(1, 9)]
        if not all(torch.equal(torch.bmm(rows[:n, :size], keys[:n]), whole[:n, :size]) for n, size in sizes):
            raise ModelError(
                f"on this machine attention with heads of {dim} depends on what is computed together, so trainer and engine "
                "cannot be equal to the bit: set policy.exact to false"
            )


_WAYS: dict[Any, Callable[..., Any]] = {
    functional.linear: linear,
    functional.silu: _silu,
    functional.gelu: _gelu,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **{each: partial(_reduced, each) for each in (torch.sum, Tensor.sum, torch.mean, Tensor.mean)},
    **{each: partial(_only_on_a_cpu, each) for each in (torch.bmm, Tensor.bmm, torch.baddbmm, torch.addmm, torch.einsum)},
}
