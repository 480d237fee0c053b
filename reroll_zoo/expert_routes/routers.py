"""The routers of a model, prepared so that a `Routing` sees what they choose, and may decide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from reroll.errors import ModelError
from reroll.models.routing import RouteShape, Routing, unknown
from reroll_zoo.expert_routes.families import why_not_replayed


def prepare_routers(model: PreTrainedModel) -> RouteShape:
    """What its routers choose. From now on they do as a `Routing` says that is given to `hidden_states`. Raises ModelError if
    they cannot."""
    if reason := why_not_replayed(model.config.get_text_config().to_dict()):
        raise ModelError(f"{reason}: leave out policy.replay_routes")
    routers = list(_routers(model))
    choices = {(router.num_experts, router.top_k) for router in routers}
    if len(choices) != 1:
        raise ModelError(
            "the choice of experts is replayed where all layers choose as many among as many, and here they choose "
            f"{', '.join(f'{k} of {n}' for n, k in sorted(choices)) or 'none'}: leave out policy.replay_routes"
        )
    [(num_experts, top_k)] = choices
    dtype = torch.uint8 if num_experts <= unknown(torch.uint8) else torch.int16
    return RouteShape(len(routers), top_k, dtype)


class _RoutedForward:
    """Stands in for the forward pass of a layer's router."""

    def __init__(self, router: nn.Module, layer: int) -> None:
        self._forward, self._layer = router.forward, layer
        self.num_experts, self.top_k = int(router.num_experts), int(router.top_k)  # type: ignore[arg-type]
        self._routing: Routing | None = None

    def __call__(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, weights and the experts chosen."""
        routing = self._routing
        if routing is None or routing.is_free:
            result: tuple[Tensor, Tensor, Tensor] = self._forward(*inputs, **options)
            if routing is not None:
                routing.choose(self._layer, result[2])
            return result
        with _ForcedChoice(routing, self._layer, (self.num_experts, self.top_k)) as choice:
            result = self._forward(*inputs, **options)
        if choice.num_made != 1:
            raise ModelError(
                f"a router that chooses {choice.num_made} times cannot be replayed: set policy.replay_routes=false"
            )
        return result

    def prepare(self, layer: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """A hook on the layer. What is recomputed for the backward pass goes by here too."""
        self._routing = options.get("reroll_routing")


class _ForcedChoice(TorchFunctionMode):
    """Inside, the `topk` of a router over all its experts takes those that the routing says, with their scores."""

    def __init__(self, routing: Routing, layer: int, choice: tuple[int, int]) -> None:
        super().__init__()
        self._routing, self._layer, self._choice = routing, layer, choice
        self.num_made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if scores.ndim != 2 or (scores.shape[1], result.indices.shape[1]) != self._choice:
            return result  # Some choose groups of experts first.
        self.num_made += 1
        chosen = self._routing.choose(self._layer, result.indices)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


def _routers(model: PreTrainedModel) -> Iterator[_RoutedForward]:
    """Those of all layers, in order: each a module beside the layer's `experts`."""
    num = 0
    for layer in model.base_model.get_submodule("layers").children():
        for block in layer.modules():
            children = dict(block.named_children())
            router = children.get("gate", children.get("router"))
            if "experts" not in children or router is None:
                continue
            if not isinstance(router.forward, _RoutedForward):
                routed = _RoutedForward(router, num)
                router.forward = routed
                layer.register_forward_pre_hook(routed.prepare, with_kwargs=True)
            yield router.forward
            num += 1
