"""Layers that carry a state from token to token (GatedDeltaNet, Mamba2, short convolutions), on packed tokens.

Transformers' own modules compute them, with the kernels of flash-linear-attention, mamba_ssm and causal_conv1d where those
are installed and in PyTorch elsewhere. They take rows [N, L, hidden], each from an empty state or from one that is handed
over. Which tokens are a row, and from which state it goes on, is decided by the object that also decides what tokens attend
to: see `Mixes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.config.recurrent import MAMBA, MIXERS
from reroll.config.registry import load_entry
from reroll.errors import ModelError

_MIXERS, _MAMBA = frozenset(MIXERS.values()), frozenset(MAMBA.values())

_KEYS = ("k_proj", "kv_b_proj")
"""What makes the keys, in modules that attend."""

KINDS = frozenset({"conv", "linear_attention", "hybrid", "mlp", "moe"})
"""What `layer_types` calls layers of models that have them, beside those with attention."""

Run = Callable[[Tensor, Any], Tensor]
"""A module over rows [N, L, hidden] -> the same. It goes on from the state, and leaves there the one after the last token;
None: it begins with an empty one, and nothing is kept."""


class Mixes(Protocol):
    """Decides, for one forward pass, which packed tokens are rows."""

    def mix(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """hidden [T, hidden] -> what the module of this layer makes of it, [T, hidden]."""


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The modules of this model that carry a state, by layer."""
    return {module.layer_idx: module for module in model.modules() if type(module).__name__ in _MIXERS}  # type: ignore[misc]


def is_recurrent(model: nn.Module) -> bool:
    """Whether some layer of this model carries a state."""
    return any(type(module).__name__ in _MIXERS for module in model.modules())


def weights_taken_past_adapters(model: nn.Module) -> set[nn.Module]:
    """The linear layers that are not called where the kernels of mamba_ssm are installed: those take their weights."""
    mixers = [module for module in model.modules() if type(module).__name__ in _MAMBA]
    return {mixer.get_submodule("out_proj") for mixer in mixers}


def attention_layers(model: nn.Module) -> list[int]:
    """The layers of a recurrent model that have keys and values."""
    attend = [module for module in model.modules() if any(hasattr(module, name) for name in _KEYS)]
    mixers = set(recurrent_layers(model).values())
    return sorted({module.layer_idx for module in attend if hasattr(module, "layer_idx") and module not in mixers})  # type: ignore[misc]


def has_unknown_state(model: nn.Module) -> bool:
    """Whether some module carries a state and is none of those that are known here: they all have a short convolution."""
    known = {part for module in recurrent_layers(model).values() for part in module.modules()}
    return any(isinstance(module, nn.Conv1d) and module not in known for module in model.modules())


def mix_packed(model: PreTrainedModel) -> None:
    """Have this model's recurrent layers, if it has any, take packed tokens: what the entry point `recurrent` of the group
    `reroll.layers` does."""
    mixers = list(recurrent_layers(model).values())
    if not mixers:
        return
    prepare = load_entry("reroll.layers", "recurrent")
    if prepare is None:
        raise ModelError(
            f"no installed package runs the recurrent layers of family {model.config.model_type!r}: install reroll_zoo"
        )
    prepare(mixers, family=model.config.model_type)
