"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, ClassVar

from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.trackers.missing import missing_package


class TrackioTracker(Tracker):
    """A local dashboard: `trackio show --project reroll`. A resumed run goes on under its name."""

    packages: ClassVar[Mapping[str, str]] = {"trackio": "reroll[trackers]"}

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing_package("trackio") from error
        self._trackio = trackio
        with redirect_stdout(StringIO()):  # It advertises its commands, over the live view.
            self._run = trackio.init(
                project="reroll",
                name=folder.path.name,
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
