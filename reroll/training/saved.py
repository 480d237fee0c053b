"""A strategy's own files in a checkpoint, and the errors for those that it cannot resume from: damaged, or of another model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from reroll.errors import RunFolderError
from reroll.models.load import has_adapter

_FIX = "resume with the model and the settings that wrote it; or start a new run with policy.model set to that folder"
_NUM_NAMED = 3
"""How many differences an error lists."""


def written_by_another(folder: Path, strategy: str) -> RunFolderError:
    """The error for a checkpoint without this strategy's own part."""
    return RunFolderError(
        f"{folder} was not written by strategy {strategy}: go on with the strategy that wrote it, or start a new run with "
        "policy.model set to that folder"
    )


def write_state(state: object, file: Path) -> None:
    """`torch.save`, which by itself hides why the disk takes no more: that comes as OSError."""
    with file.open("wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # Its writer's, whose count of bytes is wrong after a write that failed.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def read_state(file: Path, *, strategy: str, device: torch.device | None) -> dict[str, Any]:
    """What `write_state` wrote; without a device, mapped from the file for those who copy it at once."""
    if not file.is_file():
        raise written_by_another(file.parent, strategy)
    with readable(file):
        state: dict[str, Any] = torch.load(file, map_location=device or "cpu", weights_only=True, mmap=device is None)
    return state


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what torch raises for a file that it cannot make sense of into RunFolderError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, AttributeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    except CheckpointException as error:
        [cause, *_] = [failure[0] for failure in error.failures.values()] or [error]
        raise _unreadable(path, cause) from error


def _unreadable(path: Path, error: BaseException) -> RunFolderError:
    reason = (str(error).strip().splitlines() or ["no more is known"])[0]
    return RunFolderError(
        f"cannot go on from {path}: {type(error).__name__}: {reason} (it is damaged, or of another model: {_FIX}; "
        "or delete this checkpoint to resume from an earlier one)"
    )


def refuse_other_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Raise RunFolderError if an adapter was saved and whole weights are trained, or the other way round."""
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter != has_adapter(model):
        was, now = ("an adapter", "every weight") if is_adapter else ("every weight", "an adapter")
        raise RunFolderError(f"{folder} was written by a run that trained {was}; this one trains {now} (lora differs: {_FIX})")


def refuse_other_model(saved: Mapping[str, Tensor], parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Raise RunFolderError with the first differences if these are not the same parameters."""
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differences = [
        f"{name} is {list(parameter.shape)} here and {list(shapes[name]) if name in shapes else 'missing'} there"
        for name, parameter in parameters.items()
        if shapes.get(name) != tuple(parameter.shape)
    ]
    if differences:
        more = f" and {len(differences) - _NUM_NAMED} more" if len(differences) > _NUM_NAMED else ""
        raise RunFolderError(f"{folder} is of another model: {'; '.join(differences[:_NUM_NAMED])}{more} ({_FIX})")
