"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import ValidationError

from reroll.config.pipeline import PipelineConfig
from reroll.errors import ConfigError, Violation
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.trackers.missing import missing_package

DEFAULT_MODE = "offline"
LOCAL_MODES = ("offline", "disabled", "dryrun")
"""In which wandb asks no server, so no key."""


class WandbTracker(Tracker):
    """Offline unless WANDB_MODE says otherwise: it never asks for a login; `wandb sync` uploads the folder later."""

    packages: ClassVar[Mapping[str, str]] = {"wandb": "reroll[trackers]"}

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        with _wandb() as (wandb, settings):
            self._run = wandb.init(
                project="reroll",
                name=folder.path.name,
                dir=str(folder.path),
                config=dict(config),
                mode=None if "WANDB_MODE" in os.environ else DEFAULT_MODE,
                settings=settings,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def login_violations(config: PipelineConfig, *, opens: bool) -> Iterator[Violation]:
    """That a run which reports to wandb's server has no key for it. The server itself is not asked."""
    if "wandb" not in config.run.trackers or config.cluster is not None:  # There the cluster's environment holds.
        return
    if os.environ.get("WANDB_MODE", DEFAULT_MODE) in LOCAL_MODES:
        return
    try:
        with _wandb() as (wandb, _):
            wandb.login(verify=False)
    except ConfigError as error:
        yield from error.violations


@contextmanager
def _wandb() -> Iterator[tuple[Any, Any]]:
    """The package and the settings for what is done with it here; what goes wrong there is a ConfigError with the fix."""
    try:
        import wandb
    except ImportError as error:
        raise missing_package("wandb") from error
    try:
        # Its own output and its capture of the terminal would break the live view. Silent, it asks for no key either.
        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings)  # Else its hints about other packages are printed in spite of the settings of the run.
        yield wandb, settings
    except ValidationError as error:  # Its settings are read from the environment.
        problem = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise _does_not_start(problem, "mend the variable of that name, WANDB_…") from error
    except wandb.Error as error:  # No key, a wrong one, or no way to its server.
        fix = "set WANDB_API_KEY or run `wandb login`; or WANDB_MODE=offline, and `wandb sync` later"
        raise _does_not_start(str(error), fix) from error


def _does_not_start(problem: str, fix: str) -> ConfigError:
    return ConfigError([Violation("run.trackers", f"wandb does not start: {problem}", fix)])
