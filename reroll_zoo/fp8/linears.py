"""Linear layers whose weights are held as 8-bit codes: made anew from what a push brings, and from nothing kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.errors import ModelError
from reroll.models.recurrent import is_recurrent
from reroll.models.sight import eye_of
from reroll_zoo.fp8.arithmetic import BLOCK, CODES, MAX_SPLIT_TILES, num_blocks, product, quantized_rows, quantized_weight
from reroll_zoo.fp8.handover import Codes, Handover, write_codes
from reroll_zoo.packed_linears import SiblingLinear, SiblingProduct, sibling_linears

FIRST_CAPABILITY = (8, 9)
"""Of GPUs that multiply 8-bit floats: Ada; Hopper is 9.0."""

TakesWeight = Callable[[Tensor], None]


def quantize(model: PreTrainedModel) -> Mapping[str, TakesWeight]:
    """Have the linear layers of the model's decoder hold 8-bit codes in the place of their weights. What is between them, the
    embedding and the head stay as they are, and adapters too.

    Returns, by the name of each weight that went, what is called with a new one. The parameters stay in the model's checks with
    their shapes, and take no memory. Raises ModelError where this model or GPU does not fit.
    """
    if reason := _why_not(model):
        raise ModelError(f"engine.precision is fp8, but {reason} (set it to bf16, or same)")
    return quantize_linears(model)


def quantize_linears(model: PreTrainedModel) -> Mapping[str, TakesWeight]:
    """`quantize` without questions: on a CPU too, where plain PyTorch computes the same, slowly."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = set(model.base_model.modules())
    takers: dict[str, TakesWeight] = {}
    handover = Handover()
    write_codes(model, handover)
    for siblings in sibling_linears(model):
        if siblings[0].layer not in inside:  # A head.
            continue
        linear = Fp8Linear([sibling.layer for sibling in siblings], handover)
        for index, sibling in enumerate(siblings):
            takers |= _replace(linear, index, sibling, names)
    return takers


def _why_not(model: PreTrainedModel) -> str | None:
    family, device = model.config.model_type, model.device
    if is_recurrent(model):
        return f"layers of {family} that carry a state are not computed in it"
    if eye_of(model) is not None:
        return f"models that see are not computed in it, and {family} does"
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        return f"the experts of {family}, which are most of its weights, are not computed in it"
    if device.type != "cuda":
        return f"the engine is on {device}, which has no products of 8-bit floats"
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} cannot multiply it: GPUs do since Ada and Hopper"
    return None


def _replace(linear: Fp8Linear, index: int, sibling: SiblingLinear, names: Mapping[int, str]) -> dict[str, TakesWeight]:
    """Put a slice of a product in the place of a layer, whose parameters are emptied."""
    layer = sibling.layer
    takers: dict[str, TakesWeight] = {names[id(layer.weight)]: partial(linear.take_weight, index)}
    if layer.bias is not None:
        takers[names[id(layer.bias)]] = partial(linear.take_bias, index)
    setattr(sibling.owner, sibling.attribute, Fp8Slice(linear, index))
    for parameter in layer.parameters():
        parameter.data = parameter.new_empty(1).expand(parameter.shape)
    return takers


class Fp8Linear(SiblingProduct):
    """One or several linear layers over the same input. The codes of their weights lie over one another, each from a whole
    block on, at addresses that never change."""

    def __init__(self, layers: Sequence[nn.Linear], handover: Handover | None = None) -> None:
        """`handover`: where the codes of an input may be."""
        super().__init__()
        self._handover = handover or Handover()
        device, self._width = layers[0].weight.device, layers[0].in_features
        self._sizes = [layer.out_features for layer in layers]
        blocks = [num_blocks(size) for size in self._sizes]
        self._firsts = [sum(blocks[:index]) for index in range(len(blocks))]
        """Block that each layer begins at."""
        codes = torch.zeros(sum(blocks) * BLOCK, self._width, dtype=torch.uint8, device=device)
        self._codes = codes.view(CODES)
        self._scales = torch.ones(sum(blocks), num_blocks(self._width), device=device)
        before = [sum(self._sizes[:index]) for index in range(len(blocks))]
        places = [
            (before[index], size, block * BLOCK) for index, size in enumerate(self._sizes) for block in range(num_blocks(size))
        ]
        self._places = torch.tensor(places, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
        has_bias = any(layer.bias is not None for layer in layers)
        self._bias = torch.zeros(sum(self._sizes), device=device) if has_bias else None
        self._is_even = self._width % BLOCK == 0 and all(size % 16 == 0 for size in self._sizes)
        for index, layer in enumerate(layers):
            self.take_weight(index, layer.weight)
            if layer.bias is not None:
                self.take_bias(index, layer.bias)

    @torch.no_grad()
    def take_weight(self, index: int, weight: Tensor) -> None:
        """Quantize the weight of a layer, wherever it lies."""
        first, size = self._firsts[index], self._sizes[index]
        codes, scales = self._codes[first * BLOCK :][:size], self._scales[first:][: num_blocks(size)]
        given = weight.to(codes.device).contiguous()
        if given.is_cuda:
            from reroll_zoo.fp8.kernels import quantize_weight_into

            with torch.cuda.device(codes.device):  # Which is each thread's own, and kernels are launched on it.
                quantize_weight_into(codes, scales, given)
        else:
            ours = quantized_weight(given)
            codes.copy_(ours[0])
            scales.copy_(ours[1])

    @torch.no_grad()
    def take_bias(self, index: int, bias: Tensor) -> None:
        """Take the bias of a layer, which stays as it is."""
        assert self._bias is not None
        start = sum(self._sizes[:index])
        self._bias[start : start + self._sizes[index]].copy_(bias)

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, self._width).contiguous()
        codes = self._handover.take(x)
        flat = self._on_gpu(rows, codes) if rows.is_cuda else self._anywhere(rows, codes)
        parts = torch.split(flat, [len(rows) * size for size in self._sizes])
        return tuple(part.view(*x.shape[:-1], size) for part, size in zip(parts, self._sizes, strict=True))

    def _on_gpu(self, rows: Tensor, codes: Codes | None = None) -> Tensor:
        """The results of each layer, flat. `codes`: of the rows, if they are there."""
        from reroll_zoo.fp8 import kernels

        return kernels.product(
            codes or kernels.quantized_rows(rows),
            (self._codes, self._scales),
            self._places,
            self._arrivals,
            self._bias,
            num_columns=sum(self._sizes),
            dtype=rows.dtype,
            is_even=self._is_even,
        )

    def _anywhere(self, rows: Tensor, codes: Codes | None = None) -> Tensor:
        whole = product(codes or quantized_rows(rows), (self._codes, self._scales))
        starts = [first * BLOCK for first in self._firsts]
        parts = [whole[:, start : start + size] for start, size in zip(starts, self._sizes, strict=True)]
        if self._bias is not None:
            parts = [part + bias for part, bias in zip(parts, torch.split(self._bias, self._sizes), strict=True)]
        return torch.cat([part.to(rows.dtype).flatten() for part in parts])


class Fp8Slice(nn.Module):
    """Stands in a model for one of the layers of an Fp8Linear."""

    def __init__(self, linear: Fp8Linear, index: int) -> None:
        super().__init__()
        self._linear, self._index = linear, index

    def forward(self, x: Tensor) -> Tensor:
        return self._linear.output(self._index, x)
