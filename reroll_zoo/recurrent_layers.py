"""Transformers' layers that carry a state, over packed tokens: what they remember of a row, and their forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from reroll.errors import ModelError
from reroll.models.recurrent import Mixes


class MixerState:
    """What one module remembers of N rows: the inputs of its short convolution and its recurrent state, if it has one. None:
    nothing yet.

    It has the methods of transformers' cache that such a module calls.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def take(self, other: MixerState) -> None:
        """Become what `other` is, in place."""
        for mine, theirs in ((self.conv, other.conv), (self.recurrent, other.recurrent)):
            if theirs is not None:
                assert mine is not None
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


def take_packed_tokens(mixers: Sequence[nn.Module], *, family: str) -> None:
    """Have these layers of a model take packed tokens."""
    forwards = {type(mixer).forward for mixer in mixers}
    if not hasattr(Cache, "get_recurrent_state") or not all(map(_takes_more, forwards)):
        raise ModelError(
            f"models of family {family!r} need a later transformers, whose recurrent layers take their state "
            "as an argument: pip install -U transformers"
        )
    for mixer in mixers:
        mixer.forward = MethodType(_forward, mixer)


def _takes_more(forward: Callable[..., Any]) -> bool:
    """Whether a forward pass takes what it does not know of, and so is given the object that says which tokens are rows."""
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature(forward).parameters.values())


def run_mixer(mixer: nn.Module, rows: Tensor, state: MixerState | None) -> Tensor:
    """Transformers' own forward: see `Run`."""
    name = "past_key_values" if "ShortConv" in type(mixer).__name__ else "cache_params"
    output: Tensor = type(mixer).forward(mixer, rows, **{name: state})
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
