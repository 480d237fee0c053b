"""The interface of a pipeline: one step, and the state to save. `run.TrainLoop` drives it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from reroll.config.pipeline import PipelineConfig
from reroll.data.sources import SourceRows
from reroll.observe.metrics import Stats
from reroll.observe.progress import TrainView
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.observe.trackers import Tracker
from reroll.pipeline.checkpoints import Replicas
from reroll.pipeline.controls import RunControls
from reroll.pipeline.restarts import Restarts
from reroll.training.cluster import TrainCluster

T = TypeVar("T")
C = TypeVar("C", bound=PipelineConfig)


class Interrupted(Exception):
    """The user asked to stop while a step was waiting for samples: nothing of that step has been trained."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    folder: Path
    checkpoint: Path
    num_steps: int
    seconds: float
    interrupted: bool
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """Held-out metrics by number of finished steps."""
    restarts: int = 0
    """Automatic restarts since the user started or resumed it."""

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
    """What a pipeline shares with the loop: run folder, tracker, live view, controls, and the request to stop."""

    folder: RunFolder
    tracker: Tracker
    view: TrainView
    code_folder: Path = Path()
    """Where modules that the config names may lie."""
    notes: list[str] = field(default_factory=list)
    """Messages for the view, shown once models and checkpoint are loaded."""
    restarts: Restarts = field(default_factory=Restarts)
    """Counts automatic restarts."""
    rows: SourceRows = field(default_factory=dict)
    """Rows that the checks have read already; a pipeline reads other sources itself."""
    replicas: Replicas | None = None
    num_steps: int = 0
    """Finished steps."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    controls: RunControls = field(default_factory=RunControls)
    during: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Entered with `evaluation` or `checkpoint` for as long as the run is at one."""

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
    """A training algorithm as a loop body. Subclasses implement one step, and the state needed to resume.

    Pass your own as an object (`reroll.train(config, pipeline=Mine)`), or name it in the config (`pipeline: module:Mine`).
    """

    config_class: ClassVar[type[PipelineConfig]]
    """The class of its config. A subclass may name a subclass with further fields."""
    title: ClassVar[str]
    """What it does, for the live view."""
    policy: TrainCluster

    @classmethod
    @abstractmethod
    def open(cls, config: C, context: RunContext) -> AbstractAsyncContextManager[Pipeline[Any]]:
        """Open the pipeline with its models and workers, which live as long as the context."""

    def __init__(self, config: C, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.side_models: dict[str, TrainCluster] = {}
        """Models trained beside the policy, by the name of their folder in a checkpoint."""

    @property
    def models(self) -> dict[str, TrainCluster]:
        """All trained models, by the name of their folder in a checkpoint. The policy's is the checkpoint folder itself."""
        return {"": self.policy, **self.side_models}

    @abstractmethod
    async def step(self, step: int) -> Stats:
        """Do one training step; `step` counts from 0. The metrics include `tokens`, a Sum."""

    @abstractmethod
    async def evaluate(self) -> Stats:
        """Metrics on the held-out data; empty without any."""

    @property
    @abstractmethod
    def eval_every(self) -> int:
        """Steps between evaluations; 0: only before the first and after the last."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """State for a checkpoint beside the models, as JSON: as of the last finished step, also while the next one runs."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. The models are loaded already."""

    def restart(self) -> None:
        """Called instead of `restore` when a run that has no checkpoint yet is started again."""

    @property
    def begins_from(self) -> Checkpoint | None:
        """A checkpoint of another run to start from, whose steps count as done; None: start from the config's models."""
        return None

    @property
    def last_step(self) -> int:
        """The number of steps after which the run ends."""
        return self.config.run.steps

    @abstractmethod
    async def start(self, num_steps: int) -> None:
        """Prepare for the first step, after `num_steps` finished ones. Called once, after any `restore`."""

    @abstractmethod
    async def finish(self) -> None:
        """Called after the last step: stop sampling. Only evaluation and the checkpoint remain."""
