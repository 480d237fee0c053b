"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.trackers.missing import missing_package


class TensorboardTracker(Tracker):
    """Event files; look at them with `tensorboard --logdir runs`."""

    packages: ClassVar[Mapping[str, str]] = {"tensorboard": "reroll[trackers]"}

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard") from error
        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
