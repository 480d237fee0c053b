"""Which experts a token goes to: noted where tokens are written, replayed where they are trained on.

A router scores all experts, chooses some of them by one `topk`, and weighs these by their scores. A `Routing` travels through
the model's forward beside the `Attention`, is told what every router chooses, and may have it take others. Scores and weights
stay the work of the family's own code, so that gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from reroll.config.routes import why_not_replayed
from reroll.errors import ModelError


class Routing(Protocol):
    """Sees, and may decide, where the packed tokens of one forward pass go."""

    is_free: bool
    """Whether it leaves every choice as it is."""

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        """What the router of this layer chose, [T, top_k] (layers without experts do not count) -> the experts to take."""


class RouteShape(NamedTuple):
    """What is chosen for a token, and how that is stored."""

    num_layers: int
    """Those that have experts."""
    top_k: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


def unknown(dtype: torch.dtype) -> int:
    """What stands for an expert where it is not known which was chosen."""
    return torch.iinfo(dtype).max


def can_be_noted(model: PreTrainedModel) -> bool:
    """Whether it chooses experts, and these can be noted and replayed."""
    try:
        route_shape(model)
    except ModelError:
        return False
    return True


def route_shape(model: PreTrainedModel) -> RouteShape:
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


class NotedRoutes:
    """Notes what the routers choose in one pass."""

    is_free = True

    def __init__(self, shape: RouteShape) -> None:
        self._shape = shape
        self._chosen: dict[int, Tensor] = {}

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        self._chosen[layer] = chosen.to(self._shape.dtype)
        return chosen

    def taken(self) -> Tensor:
        """[T, layers, top_k]"""
        return torch.stack([self._chosen[layer] for layer in range(self._shape.num_layers)], 1)


class ReplayedRoutes:
    """Has a model take the experts that were noted, wherever they are known."""

    is_free = False

    def __init__(self, model: PreTrainedModel, routes: Tensor) -> None:
        """`routes` [T, layers, top_k], as `NotedRoutes` gives them."""
        shape = route_shape(model)
        if routes.shape[1:] != shape[:2]:
            raise ModelError(
                f"{routes.shape[1]} layers with {routes.shape[2]} experts each were noted, and this model has "
                f"{shape.num_layers} with {shape.top_k}: replay them in the model that the engine ran"
            )
        self._routes = routes
        self._differs = torch.zeros(routes.shape[:2], dtype=torch.bool, device=routes.device)

    def choose(self, layer: int, chosen: Tensor) -> Tensor:
        noted = self._routes[:, layer]
        noted = torch.where(noted == unknown(noted.dtype), chosen, noted.long())
        self._differs[:, layer] = (chosen.sort(-1).values != noted.sort(-1).values).any(-1)
        return noted

    def differing(self) -> Tensor:
        """[T] in what share of the layers a token would have gone to other experts."""
        return self._differs.float().mean(-1)


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
