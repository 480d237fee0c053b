"""What a pipeline is: one step, what of it must be saved, and what it writes to. `run.TrainLoop` drives it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from reroll.config.pipeline import PipelineConfig
from reroll.data.sources import SourceRows
from reroll.observe.metrics import Stats
from reroll.observe.progress import TrainView
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.observe.trackers import Tracker
from reroll.pipeline.controls import RunControls
from reroll.pipeline.restarts import Restarts
from reroll.training.cluster import TrainCluster

T = TypeVar("T")
C = TypeVar("C", bound=PipelineConfig)


class Interrupted(Exception):
    """The user asked to stop while a step was waiting for samples: nothing of that step has been trained."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    folder: Path
    checkpoint: Path
    num_steps: int
    seconds: float
    interrupted: bool
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """Held-out metrics by number of finished steps."""
    restarts: int = 0
    """How often it was started anew, by itself, since the user started or resumed it."""

    def as_dict(self) -> dict[str, Any]:
        first, last = (self.evals[min(self.evals)], self.evals[max(self.evals)]) if self.evals else (None, None)
        return {
            "status": "interrupted" if self.interrupted else "finished",
            "steps": self.num_steps,
            "seconds": round(self.seconds, 1),
            "restarts": self.restarts,
            "before": first,
            "after": last,
            "checkpoint": str(self.checkpoint),
        }


@dataclass(slots=True)
class RunContext:
    """What a run writes to and how it is told to stop."""

    folder: RunFolder
    tracker: Tracker
    view: TrainView
    code_folder: Path = Path()
    """Modules that the config names may lie here."""
    notes: list[str] = field(default_factory=list)
    """What to tell once models are loaded, and a resumed run has its checkpoint."""
    restarts: Restarts = field(default_factory=Restarts)
    """How often the run was started anew."""
    rows: SourceRows = field(default_factory=dict)
    """Rows that were read when the config was checked; a pipeline reads those of other sources itself."""
    num_steps: int = 0
    """Finished so far."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    controls: RunControls = field(default_factory=RunControls)

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of `work`, or Interrupted as soon as the user asks to stop."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


class Pipeline(ABC, Generic[C]):
    """A training run. Subclasses say what one step is and what else must be saved to resume it.

    One of your own is handed over (`reroll.train(config, pipeline=Mine)`) or named in the config (`pipeline: module:Mine`).
    """

    config_class: ClassVar[type[PipelineConfig]]
    """What its part of a YAML is read as. A subclass may name a subclass with more fields."""
    title: ClassVar[str]
    """What it does, in words."""
    policy: TrainCluster

    @classmethod
    @abstractmethod
    def open(cls, config: C, context: RunContext) -> AbstractAsyncContextManager[Pipeline[Any]]:
        """The pipeline with all it needs, while its workers live."""

    def __init__(self, config: C, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.side_models: dict[str, TrainCluster] = {}
        """Models trained beside the policy, by the name of their folder in a checkpoint."""

    @property
    def models(self) -> dict[str, TrainCluster]:
        """All that are trained, by the name of their folder in a checkpoint: the policy lies in the checkpoint itself."""
        return {"": self.policy, **self.side_models}

    @abstractmethod
    async def step(self, step: int) -> Stats:
        """One batch's worth of work; `step` counts from 0. Reports at least `tokens`, a Sum."""

    @abstractmethod
    async def evaluate(self) -> Stats:
        """Held-out metrics, or no metrics if there is nothing held out."""

    @property
    @abstractmethod
    def eval_every(self) -> int:
        """Steps between evaluations; 0: only before the first and after the last."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the policy, as JSON: as it was after the last finished step, also during the next."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. The policy is already loaded."""

    def restart(self) -> None:
        """Begin a run again that was interrupted before its first checkpoint."""

    @property
    def begins_from(self) -> Checkpoint | None:
        """Another run's checkpoint, whose steps count as done; None: the models that the config names."""
        return None

    @property
    def last_step(self) -> int:
        """Where the run ends."""
        return self.config.run.steps

    @abstractmethod
    async def start(self, num_steps: int) -> None:
        """Make ready for the step after `num_steps` finished ones; called once, after any restore."""

    @abstractmethod
    async def finish(self) -> None:
        """Stop producing samples: the last step is trained, only evaluation and the checkpoint are left."""
