"""Which experts a token goes to: noted where tokens are written, replayed where they are trained on.

A router scores all experts, chooses some of them by one `topk`, and weighs these by their scores. A `Routing` travels through
the model's forward beside the `Attention`, is told what every router chooses, and may have it take others. Scores and weights
stay the work of the family's own code, so that gradients reach the router. How a family's routers are told apart and made to
listen is the entry point `routers` of the group `reroll.routes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reroll.config.registry import load_entry
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


def route_shape(model: PreTrainedModel) -> RouteShape:
    """What its routers choose. From now on they do as a `Routing` says that is given to `hidden_states`. Raises ModelError if
    they cannot."""
    prepare_routers: Callable[[PreTrainedModel], RouteShape] | None = load_entry("reroll.routes", "routers")
    if prepare_routers is None:
        raise ModelError("no installed package has the replay of experts (reroll_zoo has): leave out policy.replay_routes")
    return prepare_routers(model)


def can_be_noted(model: PreTrainedModel) -> bool:
    """Whether it chooses experts, and these can be noted and replayed."""
    try:
        route_shape(model)
    except ModelError:
        return False
    return True


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
