"""The worker that the runtime tests spawn. In a file of its own, without torch, so that an actor starts fast."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from reroll.errors import ConfigError, ModelError, RerollError, Violation
from reroll.runtime.base import WorkerInfo

if TYPE_CHECKING:
    import torch

    from reroll.tokens.batch import Batch


class Probe:
    """A worker that shows what happens to it."""

    def __init__(self, info: WorkerInfo, folder: Path | None = None, *, fail_on: int | None = None) -> None:
        if info.rank == fail_on:
            raise ZeroDivisionError("no such model file")
        self.info = info
        self.folder = folder
        self.seen: list[int] = []
        self.together = 0
        self.most_together = 0
        self.met = threading.Condition()

    def whoami(self) -> WorkerInfo:
        return self.info

    def add(self, left: int, right: int = 0, *, scale: int = 1) -> int:
        return (left + right) * scale + self.info.rank

    def double(self, value: int) -> int:
        return value * 2

    def remember(self, value: int) -> None:
        time.sleep(0.002)
        self.seen.append(value)

    def memory(self) -> list[int]:
        return self.seen

    def fail(self, kind: str) -> None:
        self._fail_deep_inside(kind)

    def _fail_deep_inside(self, kind: str) -> None:
        if kind == "model":
            raise ModelError("cannot load it")
        if kind == "config":
            raise ConfigError([Violation("run.steps", "too few", "raise it")])
        if kind == "unpicklable":
            raise Unpicklable(left="a", right="b")
        if kind == "exit":
            raise SystemExit(3)
        raise KeyError(kind)

    def fail_if(self, doomed: bool) -> None:
        if doomed:
            raise ValueError("doomed at once")
        time.sleep(0.3)
        self.seen.append(1)

    def meet(self, size: int) -> None:
        """Leaves when so many calls have been here at once, and gives more of them a moment to come."""
        with self.met:
            self.together += 1
            self.most_together = max(self.most_together, self.together)
            self.met.notify_all()
            self.met.wait_for(lambda: self.most_together >= size, timeout=120)
        time.sleep(0.05)
        with self.met:
            self.together -= 1

    def most_met(self) -> int:
        return self.most_together

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def tokens(self, batch: Batch) -> Batch:
        return batch.replace(old_logp=batch.logp * 2)

    def weigh(self, weights: dict[str, torch.Tensor]) -> float:
        return float(weights["w"].sum())

    def hang(self) -> None:
        time.sleep(60)

    def nap(self) -> None:
        time.sleep(1)

    def close(self) -> None:
        if self.folder is not None:
            (self.folder / f"closed-{self.info.rank}").touch(exist_ok=False)


class LoudProbe(Probe):
    """Overrides a method of the class that the caller names."""

    def double(self, value: int) -> int:
        return value * 200


class Unpicklable(RerollError):
    """Its constructor cannot be called with its own args."""

    def __init__(self, *, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")
