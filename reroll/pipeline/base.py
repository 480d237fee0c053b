"""The loop that all pipelines share: step, evaluate when due, log, checkpoint when due, leave cleanly."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from reroll.config.offline import PipelineConfig
from reroll.errors import RerollError, RunFolderError
from reroll.observe.files import read_jsonl
from reroll.observe.metrics import Stats
from reroll.observe.progress import TrainView
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.observe.trackers import Tracker
from reroll.pipeline.checkpoints import Checkpoints
from reroll.pipeline.restarts import Restarts
from reroll.pipeline.resume import STATE_FILE, read_state
from reroll.runtime.cores import busy_remark, core_watch
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
    num_steps: int = 0
    """Finished so far."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

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
        self.evals: dict[int, dict[str, float]] = {}
        self.side_models: dict[str, TrainCluster] = {}
        """Models trained beside the policy, by the name of their folder in a checkpoint."""
        self._checkpoints = Checkpoints(context.folder, config.checkpoint)
        self._num_updates = 0
        """Optimizer steps of all models, as of the last finished step."""

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

    @abstractmethod
    async def start(self, num_steps: int) -> None:
        """Make ready for the step after `num_steps` finished ones; called once, after any restore."""

    @abstractmethod
    async def finish(self) -> None:
        """Stop producing samples: the last step is trained, only evaluation and the checkpoint are left."""

    async def run(self) -> Outcome:
        """To the last step, or until the user stops it. Ends with a checkpoint of the last finished step, also by an error,
        unless the step after it has already touched the weights.
        """
        started = time.perf_counter()
        context = self.context
        context.num_steps = await self._resume()
        await self.start(context.num_steps)
        try:
            if context.num_steps == 0:
                await self._evaluate_and_log(0)
        except Interrupted:
            pass  # The loop sees the same wish, and leaves with a checkpoint of step 0.
        async with self._checkpoints:
            try:
                await self._loop()
            except Exception as error:
                await self._save_in_spite_of(error)
                raise
            checkpoint = await self._last_checkpoint(context.num_steps)
        seconds, interrupted = time.perf_counter() - started, context.stop.is_set()
        return Outcome(
            context.folder.path,
            checkpoint,
            context.num_steps,
            seconds,
            interrupted,
            evals=self.evals,
            restarts=context.restarts.num,
        )

    async def _loop(self) -> None:
        """Go on to the last step, or until the user stops it."""
        total = self.config.run.steps
        while (num_steps := self.context.num_steps) < total and not self.context.stop.is_set():
            await self._checkpoints.raise_if_failed()
            self.context.folder.check_owned()
            try:
                num_steps = await self._step_and_log(num_steps)
                if num_steps == total:
                    await self.finish()
                if num_steps == total or _is_due(num_steps, self.eval_every):
                    await self._evaluate_and_log(num_steps)
            except Interrupted:
                break
            if num_steps < total and _is_due(num_steps, self.config.checkpoint.every):
                self.context.tracker.log(num_steps, await self._take_checkpoint(num_steps))

    def _count_updates(self) -> int:
        return sum(model.num_updates for model in (self.policy, *self.side_models.values()))

    async def _save_in_spite_of(self, error: Exception) -> None:
        """Save the last finished step of a run that ends by an error, and delete no older one: the error may lie in this one.

        Where the folder itself is what failed there is no place to save it, and weights that are half-way through a step are
        no step's.
        """
        num_steps, view = self.context.num_steps, self.context.view
        if isinstance(error, RunFolderError) or num_steps in (0, self._checkpoints.last_step):
            return
        if self._count_updates() != self._num_updates:
            view.note(f"step {num_steps} is not saved: the step after it has already changed the weights")
            return
        try:
            await self._take_checkpoint(num_steps, keep_all=True)
            await self._checkpoints.finish()
        except RerollError as failure:
            view.note(f"step {num_steps} could not be saved: {failure}")
        else:
            view.note(f"step {num_steps}, the last that was finished, is saved: --resume goes on from it")

    async def _step_and_log(self, step: int) -> int:
        """Returns how many steps are finished then."""
        started = time.perf_counter()
        stats = await self.step(step)
        self.context.num_steps, self._num_updates = step + 1, self._count_updates()
        self.context.restarts.reached(step + 1)
        seconds = time.perf_counter() - started
        values = stats.values_by_name()
        core_wait = core_watch().take_wait()
        values |= {
            "time/step_s": seconds,
            "throughput/tokens_per_s": values["tokens"] / seconds,
            "machine/core_wait": core_wait,
            "run/restarts": self.context.restarts.num,
        }
        self.context.tracker.log(step + 1, values)
        self.context.view.update(step + 1, values, remark=busy_remark(core_wait))
        return step + 1

    async def _evaluate_and_log(self, num_steps: int) -> None:
        values = (await self.evaluate()).values_by_name()
        if values:
            self.evals[num_steps] = values
            self.context.tracker.log(num_steps, values)
            self.context.view.update(num_steps, values)

    async def _take_checkpoint(self, num_steps: int, *, keep_all: bool = False) -> dict[str, float]:
        """Returns how long the run stood still for it."""
        state = {"steps": num_steps, "evals": self.evals, "pipeline": self.state()}
        return await self._checkpoints.take(num_steps, {"": self.policy, **self.side_models}, state, keep_all=keep_all)

    async def _last_checkpoint(self, num_steps: int) -> Path:
        """Where the run's end is saved, for certain."""
        if num_steps == self._checkpoints.last_step:
            await self._checkpoints.finish()
        else:
            times = await self._take_checkpoint(num_steps)
            times["time/checkpoint_wait_s"] += await self._checkpoints.finish()
            self.context.tracker.log(num_steps, times)
        latest = self.context.folder.latest_checkpoint()
        assert latest is not None
        return latest.path

    async def _resume(self) -> int:
        """Load the newest checkpoint, if there is one. Returns how many steps are behind us.

        The run's files are touched only after that: one that cannot go on leaves them as they were.
        """
        folder, view = self.context.folder, self.context.view
        latest = folder.latest_checkpoint()
        if latest is not None:
            await self._load(latest)
            view.note(f"resumed from {latest.path} after {latest.step} steps")
        elif not folder.has_begun:
            self.restart()
        for note in self.context.notes:
            view.note(note)
        folder.go_on()
        view.recall(read_jsonl(folder.metrics_path))
        return latest.step if latest else 0

    async def _load(self, checkpoint: Checkpoint) -> None:
        saved = read_state(checkpoint)
        for name in self.side_models:
            if not (checkpoint.path / name).is_dir():
                raise RunFolderError(
                    f"{checkpoint.path} holds no {name}, which this run trains beside the policy: resume with the algorithm "
                    "that wrote it, or start a new run with policy.model set to that folder"
                )
        await self.policy.load(checkpoint.path)
        for name, model in self.side_models.items():
            await model.load(checkpoint.path / name)
        fresh = self.state().keys() - saved["pipeline"].keys()
        try:
            self.restore(saved["pipeline"])
        except KeyError as error:
            raise RunFolderError(
                f"{checkpoint.path / STATE_FILE} has no {error}: it was written by another version of reroll, or by hand "
                "(resume with the version that wrote it, or start a new run with policy.model set to that folder)"
            ) from error
        self.context.notes += [f"{STATE_FILE} has no {name}, as an earlier version wrote it: it starts anew" for name in fresh]
        self.evals = {int(step): values for step, values in saved["evals"].items()}
        self._checkpoints.last_step = checkpoint.step
        self._num_updates = self._count_updates()


def _is_due(num_steps: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after this many."""
    return bool(every) and num_steps % every == 0
