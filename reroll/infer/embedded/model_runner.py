"""Runs the policy's Hugging Face modules for the engine, with weights adopted by reference where possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.config.registry import load_entry
from reroll.errors import ModelError
from reroll.models.attention import Attention, hidden_states, logits
from reroll.models.exact import can_be_exact
from reroll.models.recurrent import attention_layers, is_recurrent
from reroll.models.routing import NotedRoutes, RouteShape, route_shape
from reroll.models.sight import Eye, Sight, eye_of


class WeightChecker:
    """Checks weights, by Hugging Face name, against a model. They may come in parts; `rest` checks that all are there."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())  # Tied parameters appear once.
        self._aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(self.parameters)
        self.received: frozenset[str] = frozenset()
        """Names received in parts since weights were last complete."""

    def part(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some of the weights, each under one name. Raises ValueError if they do not fit."""
        taken = self._checked(given, missing=())
        self.received |= taken.keys()
        return taken

    def rest(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rest of the weights, each under one name. Raises ValueError unless all that is trained has come now."""
        trained = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        taken = self._checked(given, missing=trained - set(given) - self.received)
        self.received = frozenset()
        return taken

    def _checked(self, given: Mapping[str, Tensor], *, missing: Collection[str]) -> dict[str, Tensor]:
        unknown = set(given) - set(self.parameters) - self._aliases
        if missing or unknown:
            raise ValueError(f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        taken = {name: tensor.detach() for name, tensor in given.items() if name in self.parameters}
        for name, tensor in taken.items():
            if tensor.shape != (needed := self.parameters[name].shape):
                raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, the model needs {tuple(needed)}")
        return taken


class PackedWeights(Protocol):
    """A copy of linear layers in a layout that is quicker to multiply by. The layers themselves keep the parameters."""

    def reads(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the copy is made from some of these."""

    def repack(self) -> None:
        """Make it anew."""


Quantize = Callable[[PreTrainedModel], Mapping[str, Callable[[Tensor], None]]]
"""Has layers hold their weights in fewer bits; gives, by the name of each weight that went, what takes a new one."""


class ModelRunner:
    """Runs the model on packed tokens, and takes new weights.

    Weights that have the model's dtype and device are adopted: the parameter becomes the very tensor that was given,
    so a trainer on the same device shares its memory. Others are copied. bf16 on a CPU is different: there the linear
    layers keep copies of their own in oneDNN's packed layout, which is much faster, so a push copies.

    Where the model has an adapter, that alone may be given: the rest is frozen, and stays.
    """

    def __init__(self, model: PreTrainedModel, *, notes_routes: bool = False, quantize: Quantize | None = None) -> None:
        """With `notes_routes` it tells which experts its tokens go to."""
        self.model = model
        self.routes: RouteShape | None = route_shape(model) if notes_routes else None
        self.eye: Eye | None = eye_of(model)
        """What it sees with, if it does."""
        self._config: Any = model.config.get_text_config()
        self._checker = WeightChecker(model)
        self._parameters = self._checker.parameters
        self.address_version = 0
        """Counts up whenever a weight has moved in memory."""
        self._own = set(self._parameters)
        self._quantized = quantize(model) if quantize else {}
        pack_linears = load_entry("reroll.kernels", "cpu")
        self._packed: list[PackedWeights] = pack_linears(model, if_exact=can_be_exact(model)) if pack_linears else []

    @property
    def num_layers(self) -> int:
        return self._config.num_hidden_layers  # type: ignore[no-any-return]

    @property
    def attention_layers(self) -> list[int]:
        """The layers that have keys and values."""
        return attention_layers(self.model) if self.is_recurrent else list(range(self.num_layers))

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer carries a state from token to token."""
        return is_recurrent(self.model)

    @property
    def num_heads(self) -> int:
        return self._config.num_attention_heads  # type: ignore[no-any-return]

    @property
    def num_kv_heads(self) -> int:
        config = self._config  # Families in which heads share no keys do not have the field.
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        config = self._config
        if hasattr(config, "qk_nope_head_dim"):  # Latent attention: keys of two parts, and values of another size.
            return max(int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim))
        # Families that leave it out divide the hidden size.
        return int(_same_in_all_layers(config, "head_dim") or config.hidden_size // config.num_attention_heads)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def noted_routes(self) -> NotedRoutes | None:
        """What notes the experts of one pass, where they are to be noted."""
        return None if self.routes is None else NotedRoutes(self.routes)

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: Attention, noted: NotedRoutes | None = None, sight: Sight | None = None
    ) -> Tensor:
        """[T, hidden]"""
        return hidden_states(self.model, ids, positions, attention, noted, sight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab]"""
        return logits(self.model, hidden)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights and what was loaded in parts: at least those that are trained, by Hugging Face name.

        A tied one may have other names too.
        """
        received = self._checker.received
        given = self._unquantized(self._checker.rest(weights))
        for name, tensor in given.items():
            self._take(name, self._parameters[name], tensor)
        if self.eye is not None:
            self.eye.forget()
        changed = [self._parameters[name] for name in received | given.keys()]
        for linear in self._packed:
            if linear.reads(changed):
                linear.repack()

    def load_part(self, weights: Mapping[str, Tensor]) -> None:
        """Copy these into the model's own memory; `load` completes them."""
        given = self._unquantized(self._checker.part(weights))
        if not given:
            return
        for name in given.keys() - self._own:  # It is the trainer's: what is written here must not show there.
            self._parameters[name].data = torch.empty_like(self._parameters[name])
            self.address_version += 1
        with torch.no_grad():  # One launch for many small tensors, on a GPU.
            torch._foreach_copy_([self._parameters[name] for name in given], list(given.values()))
        self._own |= given.keys()

    def _unquantized(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take those at once that are held in fewer bits; the others."""
        for name in given.keys() & self._quantized:
            self._quantized[name](given.pop(name))
        return given

    def _take(self, name: str, parameter: nn.Parameter, given: Tensor) -> None:
        if name in self._own and (given.dtype, given.device) != (self.dtype, self.device):
            with torch.no_grad():
                parameter.copy_(given)
            return
        before = parameter.data_ptr()
        parameter.data = given.to(device=self.device, dtype=self.dtype)
        self._own -= {name}
        self.address_version += parameter.data_ptr() != before


def _same_in_all_layers(config: Any, name: str) -> Any:
    """A field of the config, None if it has none. Of a family in which it may differ from layer to layer, transformers raises
    an error of its own."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:
        raise ModelError(
            f"{name} differs between the layers of family {config.model_type!r}: the embedded engine takes models whose layers "
            "are alike (set engine.kind to vllm)"
        ) from error
