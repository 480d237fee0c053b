"""Rows of data sets as the `datasets` library has them: of the Hugging Face hub, or of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reroll.errors import DataError
from reroll_zoo.tables.config import DatasetsSourceConfig

_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves in a folder; one that is laid out as on the hub has neither."""


def read_dataset(config: DatasetsSourceConfig) -> Iterator[Mapping[str, Any]]:
    """Its rows in order. A name of the hub is downloaded once, and read from `datasets`' cache from then on.

    Raises DataError if there is no such data set, subset or split, or the hub is not reached.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{config.path}: reading data sets needs the datasets package: {config.pip_line}") from error
    stored = _load(config, datasets)
    if isinstance(stored, datasets.DatasetDict):
        stored = _only_split(config, stored)
    elif config.split is not None and _is_saved(config.path):
        raise DataError(f"{config.path}: holds one data set without splits (remove `split: {config.split}`)")
    yield from stored


def _load(config: DatasetsSourceConfig, datasets: Any) -> Any:
    if not config.path.is_dir() and not config.is_hub_name:
        fix = "write it with `Dataset.save_to_disk`, or name a data set of the hub"
        raise DataError(f"{config.path}: no such folder, seen from {Path.cwd()} ({fix})")
    if _is_saved(config.path):
        try:
            return datasets.load_from_disk(str(config.path))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{config.path}: not a folder that `Dataset.save_to_disk` wrote: {error}") from error
    try:
        return datasets.load_dataset(str(config.path), config.subset, split=config.split, revision=config.revision)
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        is_folder = config.path.is_dir()
        fix = "write it with `Dataset.save_to_disk`, or lay it out as on the hub" if is_folder else _hub_fix(error, datasets)
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(f"{config.path}: {reason} ({fix})") from error


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def _hub_fix(error: Exception, datasets: Any) -> str:
    if isinstance(error, ConnectionError):
        return "the hub is not reached: check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return "check the name; a private or gated data set needs a login: `hf auth login`"
    return "check `subset`, `split` and `revision`"


def _only_split(config: DatasetsSourceConfig, stored: Mapping[str, Any]) -> Any:
    split = next(iter(stored)) if config.split is None and len(stored) == 1 else config.split
    if split is None or split not in stored:
        problem = "holds several splits" if split is None else f"has no split {split!r}"
        raise DataError(f"{config.path}: {problem} (set `split` to one of: {', '.join(stored)})")
    return stored[split]
