"""Where a run's numbers go: metrics.jsonl always, and on request to what packages registered in the group `reroll.trackers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from reroll.config.registry import load_entry
from reroll.observe.files import append_jsonl
from reroll.observe.run_folder import RunFolder


class Tracker(Protocol):
    """Takes the numbers of each step. One step may be logged several times, with different names."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Modules of other distributions that it cannot do without, each with what pip must install for it."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Flush what is held back. Nothing is logged afterwards."""


def make_tracker(names: Sequence[str], folder: RunFolder, *, config: Mapping[str, Any], start_step: int = 0) -> Tracker:
    """One tracker that feeds metrics.jsonl and every tracker in `names`. Raises ConfigError if a package is missing.

    `start_step` is the number of steps that were finished before: later rows of an interrupted run are superseded.
    """
    trackers: list[Tracker] = [JsonlTracker(folder.metrics_path)]
    for name in names:
        trackers.append(load_entry("reroll.trackers", name)(folder, config=config, start_step=start_step))
    return TrackerGroup(trackers)


class TrackerGroup(Tracker):
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class JsonlTracker(Tracker):
    """One line per call: `{"step": 12, "reward/mean": 0.5}`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, values: Mapping[str, float]) -> None:
        append_jsonl(self._path, {"step": step, **values})

    def close(self) -> None:
        return None
