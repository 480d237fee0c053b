"""Where a run's numbers go: metrics.jsonl always; TensorBoard, Weights & Biases, Trackio and MLflow on request."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from reroll.config import parts
from reroll.errors import ConfigError, Violation
from reroll.observe.files import append_jsonl, write_atomically
from reroll.observe.run_folder import RunFolder


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
        match name:
            case "tensorboard":
                trackers.append(TensorboardTracker(folder.path / "tensorboard", start_step=start_step))
            case "wandb":
                trackers.append(WandbTracker(folder.path, config=config))
            case "trackio":
                trackers.append(TrackioTracker(folder.path.name, config=config))
            case "mlflow":
                trackers.append(MlflowTracker(folder.path, config=config))
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
        try:
            self._run = wandb.init(
                project="reroll",
                name=folder.name,
                dir=str(folder),
                config=dict(config),
                mode=None if "WANDB_MODE" in os.environ else "offline",
                # Its own output and its capture of the terminal would break the live view.
                settings=settings,
            )
        except wandb.Error as error:  # No key, a wrong one, or no way to its server.
            fix = "set WANDB_API_KEY or run `wandb login`; or WANDB_MODE=offline, and `wandb sync` later"
            raise ConfigError([Violation("run.trackers", f"wandb does not start: {error}", fix)]) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A local dashboard: `trackio show --project reroll`. A resumed run goes on under its name."""

    def __init__(self, name: str, *, config: Mapping[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing_package("trackio") from error
        self._trackio = trackio
        with redirect_stdout(StringIO()):  # It advertises its commands, over the live view.
            self._run = trackio.init(
                project="reroll",
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()  # Of the module: a run that is ended by itself is ended again, and says so, on exit.


class MlflowTracker:
    """The server that MLFLOW_TRACKING_URI names; else `mlflow.db` beside the runs: `mlflow ui --backend-store-uri sqlite:///…`."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise _missing_package("mlflow", extra="mlflow") from error
        self._metric = Metric
        runs, uri = folder.resolve().parent, os.environ.get("MLFLOW_TRACKING_URI")
        # Else what belongs to a run of a database without a server is written into the working directory.
        self._artifacts = None if uri else str(runs / "mlflow-artifacts")
        # Its migration of a new database is told step by step, over the live view.
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{runs / 'mlflow.db'}")
        known = folder / "mlflow-run.txt"
        if not known.exists():
            write_atomically(known, self._new_run(folder.name, config))
        self._id = known.read_text(encoding="utf-8")

    def _new_run(self, name: str, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name("reroll")
        experiment = (
            found.experiment_id if found else self._client.create_experiment("reroll", artifact_location=self._artifacts)
        )
        run: str = self._client.create_run(experiment, run_name=name).info.run_id
        self._client.log_dict(run, dict(config), "config.json")
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        # Its names hold no `@`.
        metrics = [self._metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _missing_package(name: str, *, extra: str = "trackers") -> ConfigError:
    return ConfigError([Violation("run.trackers", f"{name} is not installed", f"pip install 'reroll[{extra}]', or remove it")])
