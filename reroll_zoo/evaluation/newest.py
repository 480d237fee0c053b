"""A run's folder, where a model is asked for."""

from __future__ import annotations

from pathlib import Path

from reroll.errors import RunFolderError
from reroll.observe.run_folder import RunFolder


def newest_model(name: str) -> str:
    """The last checkpoint of a run, if `name` is a run's folder; else `name`. Raises RunFolderError if it has none."""
    folder = RunFolder(Path(name))
    if not folder.checkpoints_path.is_dir():
        return name
    latest = folder.latest_checkpoint()
    if latest is None:
        raise RunFolderError(f"{folder.path} has no checkpoint yet (set checkpoint.every, or name a model)")
    return str(latest.path)
