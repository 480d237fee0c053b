"""Where a run's numbers go: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from reroll.config import parts
from reroll.errors import ConfigError, Violation
from reroll.observe.run_folder import RunFolder, append_jsonl


class Tracker(Protocol):
    """Takes the numbers of each step. One step may be logged several times, with different names."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Flush what is held back. Nothing is logged afterwards."""


def make_tracker(
    names: Sequence[parts.Tracker], folder: RunFolder, *, config: Mapping[str, Any], start_step: int = 0
) -> Tracker:
    """One tracker that feeds metrics.jsonl and every tracker in `names`. Raises ConfigError if a package is missing.

    `start_step` is the number of steps that were finished before: later rows of an interrupted run are superseded.
    """
    trackers: list[Tracker] = [JsonlTracker(folder.metrics_path)]
    for name in names:
        if name == "tensorboard":
            trackers.append(TensorboardTracker(folder.path / "tensorboard", start_step=start_step))
        else:
            trackers.append(WandbTracker(folder.path, config=config))
    return TrackerGroup(trackers)


class TrackerGroup:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class JsonlTracker:
    """One line per call: `{"step": 12, "reward/mean": 0.5}`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, values: Mapping[str, float]) -> None:
        append_jsonl(self._path, {"step": step, **values})

    def close(self) -> None:
        return None


class TensorboardTracker:
    """Event files; look at them with `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing_package("tensorboard") from error
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Offline unless WANDB_MODE says otherwise: it never asks for a login; `wandb sync` uploads the folder later."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing_package("wandb") from error
        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings)  # Else its hints about other packages are printed in spite of the settings of the run.
        self._run = wandb.init(
            project="reroll",
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            # Its own output and its capture of the terminal would break the live view.
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _missing_package(name: str) -> ConfigError:
    return ConfigError([Violation("run.trackers", f"{name} is not installed", "pip install 'reroll[trackers]', or remove it")])
