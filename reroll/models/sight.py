"""Models that see: the seam between a pass over packed tokens and what knows of pictures, the group `reroll.vision`.

Ids of `reroll.pictures` stand for parts of pictures. An `Eye` says which of the packed tokens those are, and has taken the
place of the forward pass of the model's trunk: that is given what the eye saw as `reroll_sight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from reroll.config.registry import load_entry


class Sight(Protocol):
    """The pictures among the packed tokens of one pass."""

    def at(self, tokens: Tensor) -> Self:
        """Of these tokens."""


class ReadNow(NamedTuple):
    """What of one sequence a pass reads."""

    ids: NDArray[np.int64]
    """From its beginning on, if there are pictures among what is read."""
    start: int = 0
    """From which of them on they are read."""
    shift: int = 0
    """By how much they stand further back than they would in a sequence that begins with `ids`."""


class Eye(Protocol):
    """Makes a model see."""

    def look(self, parts: Sequence[ReadNow]) -> Sight | None:
        """What the packed tokens of a pass show; None where that is nothing, and all stand where their sequence has them."""

    def look_packed(self, ids: Tensor, cu_seqlens: Tensor) -> Sight | None:
        """The same for packed sequences, whole."""

    def shift_after(self, ids: NDArray[np.int64]) -> int:
        """How far the token after these stands from their number."""

    def forget(self) -> None:
        """The weights are others."""

    def save(self, folder: Path) -> None:
        """Write what a model folder needs beside model and tokenizer."""


def auto_class(source: str) -> Any:
    """What of transformers opens the model in this folder."""
    config = AutoConfig.from_pretrained(source)
    find = load_entry("reroll.vision", "auto_class") if getattr(config, "vision_config", None) is not None else None
    return (find and find(config)) or AutoModelForCausalLM


def open_eye(model: PreTrainedModel, name: str, *, trains: bool) -> None:
    """Give a model that can see its eye. `trains`: whether its tower is trained; else it is frozen."""
    if getattr(model.config, "vision_config", None) is None:
        return
    find, opened = load_entry("reroll.vision", "auto_class"), load_entry("reroll.vision", "eye")
    if find and opened and find(model.config):
        model.reroll_eye = opened(model, name, trains=trains)


def eye_of(model: PreTrainedModel) -> Eye | None:
    """None: it reads text only."""
    return cast("Eye | None", getattr(model, "reroll_eye", None))
