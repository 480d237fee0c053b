"""MLflow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from reroll.observe.files import write_atomically
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.trackers.missing import missing_package


class MlflowTracker(Tracker):
    """The server that MLFLOW_TRACKING_URI names; else `mlflow.db` beside the runs: `mlflow ui --backend-store-uri sqlite:///…`."""

    packages: ClassVar[Mapping[str, str]] = {"mlflow": "reroll[mlflow]"}

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_package("mlflow", extra="mlflow") from error
        self._metric = Metric
        runs, uri = folder.path.resolve().parent, os.environ.get("MLFLOW_TRACKING_URI")
        # Else what belongs to a run of a database without a server is written into the working directory.
        self._artifacts = None if uri else str(runs / "mlflow-artifacts")
        # Its migration of a new database is told step by step, over the live view.
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{runs / 'mlflow.db'}")
        known = folder.path / "mlflow-run.txt"
        if not known.exists():
            write_atomically(known, self._new_run(folder.path.name, config))
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
