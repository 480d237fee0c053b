"""Linear layers in oneDNN's own weight layout: in bf16 on a CPU, over half as fast again as the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from reroll_zoo.exact_sums import packed_row_step

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings that read the same input in the families we know: one product serves them all."""

_TYPICAL_ROWS = 32
"""The batch that the layout is chosen for; others run too."""


def packing_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build and machine have the packed product for this kind of weight."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class SiblingProduct:
    """What several linear layers make of an input that they share, computed for all of them when the first one is asked."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` makes of x. The last one asking lets go."""
        if x is not self._input:
            outputs = self.outputs(x)
            if len(outputs) == 1:
                return outputs[0]
            self._input, self._outputs = x, outputs
        output = self._outputs[index]
        if index == len(self._outputs) - 1:
            self._input, self._outputs = None, ()
        return output

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes of x."""
        raise NotImplementedError


class PackedLinear(SiblingProduct):
    """One or several linear layers over the same input, as one packed product.

    The packed copy is made from the original layers by `repack`, so whoever changes those calls it.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, row_step: int = 1) -> None:
        """Rows are filled up to a multiple of `row_step`."""
        super().__init__()
        self._layers, self._row_step = layers, row_step
        self._sizes = [layer.out_features for layer in layers]
        self.repack()

    def repack(self) -> None:
        with torch.no_grad():
            weight = torch.cat(tuple(layer.weight for layer in self._layers))
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
            biases = tuple(layer.bias for layer in self._layers if layer.bias is not None)
            self._bias = torch.cat(biases) if biases else None

    def reads(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the packed copy is made from some of these."""
        sources = {id(parameter) for layer in self._layers for parameter in layer.parameters()}
        return any(id(parameter) in sources for parameter in parameters)

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.product(x), self._sizes, -1)

    def product(self, x: Tensor) -> Tensor:
        """What all layers make of x [..., T, K], side by side."""
        spare = -x.shape[-2] % self._row_step
        filled = pad(x, (0, 0, 0, spare)) if spare else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self._bias, "none", [], "")
        return product[..., : x.shape[-2], :] if spare else product


class PackedSlice(nn.Module):
    """Stands in a model for one of the layers of a PackedLinear; keeps the original layer, which owns the parameters."""

    def __init__(self, layer: nn.Linear, packed: PackedLinear, index: int) -> None:
        super().__init__()
        self.layer = layer
        self._packed = packed
        self._index = index

    @property
    def weight(self) -> Tensor:
        """Routers of some families look at its type before they call it."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._packed.output(self._index, x)


def pack_linears(model: nn.Module, *, if_exact: bool = False) -> list[PackedLinear]:
    """Replace every linear layer of the model by a packed one, where this build, machine and kind of weight have it; siblings
    with a common input become one product.

    Under an adapter, that is the layer it adapts. The adapter's own matrices are thin, and change with every push. `if_exact`:
    only where the packed product is the one of `models.exact` to the bit.
    """
    packed: list[PackedLinear] = []
    first = next(model.parameters())
    if not packing_available(first.device, first.dtype):
        return packed
    for siblings in sibling_linears(model):
        layers = [sibling.layer for sibling in siblings]
        step = packed_row_step(_product_of, *_kind_of(layers)) if if_exact else 1
        if not step:
            continue
        product = PackedLinear(layers, row_step=step)
        packed.append(product)
        for index, sibling in enumerate(siblings):
            setattr(sibling.owner, sibling.attribute, PackedSlice(sibling.layer, product, index))
    return packed


@dataclass(frozen=True, slots=True)
class SiblingLinear:
    """A linear layer, and where in the model it hangs."""

    layer: nn.Linear
    owner: nn.Module
    attribute: str


def sibling_linears(model: nn.Module) -> list[list[SiblingLinear]]:
    """Every linear layer of the model, those with a common input together. Under an adapter, the layer it adapts."""
    found: list[list[SiblingLinear]] = []
    inside_adapted = {part for module in model.modules() if _base_layer(module) for part in module.modules()}
    for parent in [module for module in model.modules() if module not in inside_adapted]:
        children = dict(parent.named_children())
        plain = {name: _base_layer(child) or child for name, child in children.items()}
        linears = {name: layer for name, layer in plain.items() if isinstance(layer, nn.Linear)}
        groups = [[name for name in group if name in linears] for group in _FUSED]
        groups = [group for group in groups if len({linears[name].bias is None for name in group}) == 1]
        fused = {name for group in groups for name in group}
        for group in [*groups, *([name] for name in linears if name not in fused)]:
            owners = [(children[name], "base_layer") if _base_layer(children[name]) else (parent, name) for name in group]
            found.append([SiblingLinear(linears[name], *owner) for name, owner in zip(group, owners, strict=True)])
    return found


def _kind_of(layers: Sequence[nn.Linear]) -> tuple[tuple[int, ...], int, torch.dtype, bool]:
    first = layers[0]
    return tuple(layer.out_features for layer in layers), first.in_features, first.weight.dtype, first.bias is not None


def _product_of(layers: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    return PackedLinear(layers).product


def _base_layer(module: nn.Module) -> nn.Module | None:
    """What an adapter was put around, if this module is one."""
    return dict(module.named_children()).get("base_layer")
