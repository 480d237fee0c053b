"""What this machine has, asked without torch: its GPUs and the models stored on it."""

from __future__ import annotations

import json
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from reroll.config.parts import Devices, DeviceSelectionConfig


class SelectableNodes(Protocol):
    """The machines of a cluster, whose GPUs a config may select by what they are instead of by index."""

    def select(self, selection: DeviceSelectionConfig) -> tuple[str, ...]:
        """Their indices. Raises ValueError, with what there is, if too few match."""


def parse_devices(value: Devices, *, num_gpus: int | None = None, nodes: SelectableNodes | None = None) -> tuple[str, ...]:
    """`cpu` or GPU indices as text. `auto` gives all of `num_gpus` (default: those visible here), or `cpu` if there is none.

    A selection is looked up in `nodes`. Raises ValueError for what names no devices.
    """
    if isinstance(value, DeviceSelectionConfig):
        if nodes is None:
            raise ValueError("a selection needs nodes to choose from: set runtime: {kind: ray}, or name indices")
        return nodes.select(value)
    if value == "auto":
        return tuple(str(index) for index in range(num_visible_gpus() if num_gpus is None else num_gpus)) or ("cpu",)
    if value == "cpu":
        return ("cpu",)
    if isinstance(value, list):
        indices = list(value)
    elif isinstance(value, int) or value.isdigit():
        indices = [int(value)]
    elif match := re.fullmatch(r"(\d+)-(\d+)", value):
        indices = list(range(int(match[1]), int(match[2]) + 1))
    else:
        raise ValueError(f"{value!r} names no devices")
    if not indices or min(indices) < 0 or len(set(indices)) != len(indices):
        raise ValueError(f"{value!r} names no devices, or one twice")
    return tuple(str(index) for index in indices)


def num_visible_gpus() -> int:
    """CUDA devices this process would see: CUDA_VISIBLE_DEVICES if set, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops at the first entry that is no device: `-1` hides what follows it.
        return len(list(takewhile(lambda part: part.strip() not in ("", "-1"), visible.split(","))))
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def foreign_environment() -> dict[str, str]:
    """This process's environment for a Python that has other packages: without what names those of this one."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def models_dir() -> Path:
    """Where `reroll models fetch` stores models: $REROLL_MODELS, or ./models."""
    return Path(os.environ.get("REROLL_MODELS", "models"))


def model_folder(name: str) -> Path | None:
    """Where a model lies on this disk: a folder of this name, or a fetched model; None if there is none.

    It holds a whole model, or an adapter that names its base.
    """
    for folder in (Path(name).expanduser(), models_dir() / name):
        if (folder / "config.json").is_file() or adapter_base(folder):
            return folder
    return None


def model_config(name: str) -> dict[str, Any] | None:
    """What the config.json of a model says, of an adapter that of its base; None if there is none to read."""
    folder = model_folder(name)
    if folder is None:
        return None
    if base := adapter_base(folder):
        return model_config(base)
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def model_card(name: str) -> dict[str, Any] | None:
    """What of it is about the decoder."""
    found = model_config(name)
    card = found.get("text_config", found) if found else None
    return card if isinstance(card, dict) else None


def is_path(name: str) -> bool:
    """Whether a model's name can only be a path: no hub id begins like this, or has so many parts."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def adapter_base(folder: Path) -> str | None:
    """The model that the adapter in this folder belongs to; None if the folder holds a whole model, or nothing of the kind."""
    file = folder / "adapter_config.json"
    if (folder / "config.json").is_file() or not file.is_file():
        return None
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError):
        return None
    return base if isinstance(base, str) and base else None
