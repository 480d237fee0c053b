"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from reroll.errors import ConfigError, Violation
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.trackers.missing import missing_package


class WandbTracker(Tracker):
    """Offline unless WANDB_MODE says otherwise: it never asks for a login; `wandb sync` uploads the folder later."""

    packages: ClassVar[Mapping[str, str]] = {"wandb": "reroll[trackers]"}

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb") from error
        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings)  # Else its hints about other packages are printed in spite of the settings of the run.
        try:
            self._run = wandb.init(
                project="reroll",
                name=folder.path.name,
                dir=str(folder.path),
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
