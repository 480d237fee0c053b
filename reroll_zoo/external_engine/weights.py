"""Weights that a trainer publishes, assembled as the loaders of vLLM and sglang take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.infer.embedded.model_runner import WeightChecker
from reroll.models.load import load_model, resolve_base, skeleton
from reroll.models.quantized import quantization

_A, _B, _FROZEN = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
"""How peft names the parts of an adapted layer."""

_EXPERTS = ".experts."


class HFWeightAssembler:
    """Checks weights against a model, and assembles full ones under the names of its Hugging Face folder.

    For a policy with an adapter, the adapter alone is enough: it is merged into the base, in fp32, at every push. The engine
    then runs one plain matrix per layer: faster than an adapter beside it, and the same for every rank, family and layer. The
    base is what was pushed of it, if anything was (a trainer in this process hands it over), else read from the folder.
    """

    def __init__(self, model: str, *, lora: LoraConfig | None) -> None:
        if method := quantization(resolve_base(model)):
            raise ModelError(
                f"{model} stores weights quantized by {method!r}, and plain ones are pushed: write a plain checkpoint with "
                f"`reroll models dequantize {model} FOLDER` and name that, or take engine: {{kind: embedded}}"
            )
        shape = skeleton(model, lora=lora)
        self._model = model
        self._checker = WeightChecker(shape)
        self._scale = lora.alpha / lora.rank if lora else None
        self._base: dict[str, Tensor] = {}

    @property
    def come_in_parts(self) -> bool:
        """Whether some can be used before the others are here: no layer is merged or taken apart."""
        return self._scale is None and not any(_EXPERTS in name for name in self._checker.parameters)

    def part(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some of the weights, by the names of the folder; `complete` takes the rest. Raises ValueError if they do not fit."""
        assert self.come_in_parts
        return self._checker.part(given)

    def complete(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every weight of the model without adapters, as its folder names them, but for those that came in parts.

        Raises ValueError if those given do not fit, or do not complete the parts.
        """
        tensors = self._checker.rest(given)
        if self._scale is None:
            return _unstacked(tensors)
        self._base |= {_plain(name): tensor for name, tensor in tensors.items() if not name.endswith((_A, _B))}
        base = self._complete_base()
        return _unstacked(base | _merged(base, tensors, scale=self._scale))

    def _complete_base(self) -> dict[str, Tensor]:
        names = {_plain(name) for name in self._checker.parameters if not name.endswith((_A, _B))}
        if names - set(self._base):
            stored = load_model(self._model, dtype=torch.float32, device="cpu")
            self._base = {name: parameter.detach() for name, parameter in stored.named_parameters()} | self._base
        return self._base


def _unstacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as the hub's folders and the engines' loaders have them. transformers stacks a layer's. Views."""
    single: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, _, part = name.rpartition(_EXPERTS)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part if layer else "")
        if parts is None:
            single[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            for key, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                single[f"{layer}{_EXPERTS}{index}.{key}.weight"] = matrix
    return single


def _plain(name: str) -> str:
    return name.replace(_FROZEN, ".")


def _merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The weights of the adapted layers: W + scale · B A."""
    merged = {}
    for name, a in adapter.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            b, weight = adapter[layer + _B], base[f"{layer}.weight"]
            merged[f"{layer}.weight"] = weight.float().to(a.device) + scale * (b.float() @ a.float())
    return merged
