"""Models that see: the seam between a pass over packed tokens and what knows of pictures, the group `reroll.vision`.

Ids of `reroll.tokens.pictures` stand for parts of pictures. An `Eye` says which of the packed tokens those are, and has taken
the place of the forward pass of the model's trunk: that is given what the eye saw as `reroll_sight`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self, cast

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from reroll.config.registry import load_entry


class Sight(Protocol):
    """The pictures among the packed tokens of one pass."""

    def at(self, tokens: Tensor, index: Tensor) -> Self:
        """Of these tokens; `index` says which of them each token is."""


class Eye(Protocol):
    """Makes a model see."""

    def look_packed(self, ids: Tensor, cu_seqlens: Tensor) -> Sight | None:
        """What packed sequences show; None where there is nothing but words."""

    def forget(self) -> None:
        """The weights are others."""

    def save(self, folder: Path) -> None:
        """Write what a model folder needs beside model and tokenizer."""


def auto_class(source: str) -> Any:
    """What of transformers opens the model in this folder."""
    return _seeing_class(AutoConfig.from_pretrained(source)) or AutoModelForCausalLM


def open_eye(model: PreTrainedModel, name: str, *, trains: bool) -> None:
    """Give a model that can see its eye. `trains`: whether its tower is trained; else it is frozen."""
    if _seeing_class(model.config):
        model.reroll_eye = load_entry("reroll.vision", "eye")(model, name, trains=trains)


def eye_of(model: PreTrainedModel) -> Eye | None:
    """None: it reads text only."""
    return cast("Eye | None", getattr(model, "reroll_eye", None))


def _seeing_class(config: Any) -> Any:
    find = load_entry("reroll.vision", "auto_class") if getattr(config, "vision_config", None) is not None else None
    return find and find(config)
