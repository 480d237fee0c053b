"""Layers that carry a state from token to token (GatedDeltaNet, Mamba2), on packed tokens.

Transformers' own modules compute them, with the kernels of flash-linear-attention, mamba_ssm and causal_conv1d where those
are installed and in PyTorch elsewhere. They take rows [N, L, hidden], each from an empty state or from one that is handed
over. Which tokens are a row, and from which state it goes on, is decided by the object that also decides what tokens attend
to: see `Mixes`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from reroll.errors import ModelError

_MAMBA = frozenset({"BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"})
_MIXERS = _MAMBA | {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
"""The modules that were seen to do the same on rows, and token by token, as Hugging Face's own."""

KINDS = frozenset({"linear_attention", "hybrid", "mlp", "moe"})
"""What `layer_types` calls layers of models that have them, beside those with attention."""


class MixerState:
    """What one module remembers of N rows: the inputs of its short convolution and its recurrent state. None: nothing yet.

    It has the methods of transformers' cache that such a module calls.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def take(self, other: MixerState) -> None:
        """Become what `other` is, in place."""
        for mine, theirs in ((self.conv, other.conv), (self.recurrent, other.recurrent)):
            assert mine is not None
            assert theirs is not None
            mine.copy_(theirs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **others: Any
    ) -> Tensor:
        """Remember the last of these inputs [N, C, L]; returns them with those before them in front."""
        if self.conv is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
            self.conv = whole[..., -size:]
        else:
            whole = torch.cat([self.conv, conv_states], -1)
            self.conv.copy_(whole[..., -self.conv.shape[-1] :])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        if self.recurrent is None:
            self.recurrent = recurrent_states
        else:
            self.recurrent.copy_(recurrent_states)
        return self.recurrent


Run = Callable[[Tensor, MixerState | None], Tensor]
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
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")]
    return sorted({module.layer_idx for module in modules})  # type: ignore[misc]


def has_unknown_state(model: nn.Module) -> bool:
    """Whether some module carries a state and is none of those that are known here: they all have a short convolution."""
    known = {part for module in recurrent_layers(model).values() for part in module.modules()}
    return any(isinstance(module, nn.Conv1d) and module not in known for module in model.modules())


def mix_packed(model: PreTrainedModel) -> None:
    """Have this model's recurrent layers, if it has any, take packed tokens."""
    mixers = recurrent_layers(model).values()
    if mixers and not hasattr(Cache, "get_recurrent_state"):
        raise ModelError(
            f"models of family {model.config.model_type!r} need a later transformers, whose recurrent layers take their state "
            "as an argument: pip install -U transformers"
        )
    for mixer in mixers:
        mixer.forward = MethodType(_forward, mixer)


def run_mixer(mixer: nn.Module, rows: Tensor, state: MixerState | None) -> Tensor:
    """Transformers' own forward: see `Run`."""
    output: Tensor = type(mixer).forward(mixer, rows, cache_params=state)
    return output


def _forward(
    mixer: nn.Module,
    hidden_states: Tensor,
    cache_params: Cache | None = None,
    attention_mask: Tensor | None = None,
    *,
    reroll_attention: Mixes | None = None,
    **others: Any,
) -> Tensor:
    """What transformers calls in every layer: [1, T, hidden] in and out."""
    if reroll_attention is None:
        raise ModelError("a model loaded by reroll runs through reroll.models.attention.hidden_states, not by calling it")
    if not hasattr(reroll_attention, "mix"):
        raise ModelError(
            "layers that carry a state from token to token need every sequence whole and in its order: they are not computed "
            f"by {type(reroll_attention).__name__}"
        )
    layer: int = mixer.layer_idx  # type: ignore[assignment]
    packed = hidden_states.squeeze(0)
    return reroll_attention.mix(layer, packed, lambda rows, state: run_mixer(mixer, rows, state)).unsqueeze(0)
