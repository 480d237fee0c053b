"""The loop that all pipelines share: step, evaluate when due, log, checkpoint when due, leave cleanly."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from reroll.config.offline import PipelineConfig
from reroll.errors import RunFolderError
from reroll.observe.metrics import Stats
from reroll.observe.progress import TrainView
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll.pipeline.checkpoints import STATE_FILE, Checkpoints
from reroll.train.cluster import TrainCluster

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

    def as_dict(self) -> dict[str, Any]:
        first, last = (self.evals[min(self.evals)], self.evals[max(self.evals)]) if self.evals else (None, None)
        return {
            "status": "interrupted" if self.interrupted else "finished",
            "steps": self.num_steps,
            "seconds": round(self.seconds, 1),
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
    """A training run. Subclasses say what one step is and what else must be saved to resume it."""

    policy: TrainCluster

    def __init__(self, config: C, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.evals: dict[int, dict[str, float]] = {}
        self.side_models: dict[str, TrainCluster] = {}
        """Models trained beside the policy, by the name of their folder in a checkpoint."""
        self._checkpoints = Checkpoints(context.folder, config.checkpoint)

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
        """What a checkpoint needs beside the policy: JSON."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. The policy is already loaded."""

    @abstractmethod
    async def start(self, num_steps: int) -> None:
        """Make ready for the step after `num_steps` finished ones; called once, after any restore."""

    @abstractmethod
    async def finish(self) -> None:
        """Stop producing samples: the last step is trained, only evaluation and the checkpoint are left."""

    async def run(self) -> Outcome:
        """To the last step, or until the user stops it. Always ends with a checkpoint of the last finished step."""
        started = time.perf_counter()
        num_steps = await self._resume()
        await self.start(num_steps)
        try:
            if num_steps == 0:
                await self._evaluate_and_log(0)
        except Interrupted:
            pass  # The loop sees the same wish, and leaves with a checkpoint of step 0.
        async with self._checkpoints:
            num_steps = await self._loop(num_steps)
            checkpoint = await self._last_checkpoint(num_steps)
        interrupted = self.context.stop.is_set()
        return Outcome(self.context.folder.path, checkpoint, num_steps, time.perf_counter() - started, interrupted, self.evals)

    async def _loop(self, num_steps: int) -> int:
        """Go on after so many steps. Returns how many there are at the end, or when the user stops it."""
        total = self.config.run.steps
        while num_steps < total and not self.context.stop.is_set():
            await self._checkpoints.check()
            try:
                await self._step_and_log(num_steps)
                num_steps += 1
                if num_steps == total:
                    await self.finish()
                if num_steps == total or _is_due(num_steps, self.eval_every):
                    await self._evaluate_and_log(num_steps)
            except Interrupted:
                break
            if num_steps < total and _is_due(num_steps, self.config.checkpoint.every):
                self.context.tracker.log(num_steps, await self._take_checkpoint(num_steps))
        return num_steps

    async def _step_and_log(self, step: int) -> None:
        started = time.perf_counter()
        stats = await self.step(step)
        seconds = time.perf_counter() - started
        values = stats.values_by_name()
        values |= {"time/step_s": seconds, "throughput/tokens_per_s": values["tokens"] / seconds}
        self.context.tracker.log(step + 1, values)
        self.context.view.update(step + 1, values)

    async def _evaluate_and_log(self, num_steps: int) -> None:
        values = (await self.evaluate()).values_by_name()
        if values:
            self.evals[num_steps] = values
            self.context.tracker.log(num_steps, values)
            self.context.view.update(num_steps, values)

    async def _take_checkpoint(self, num_steps: int) -> dict[str, float]:
        """Returns how long the run stood still for it."""
        state = {"steps": num_steps, "evals": self.evals, "pipeline": self.state()}
        return await self._checkpoints.take(num_steps, {"": self.policy, **self.side_models}, state)

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
        """Load the newest checkpoint, if there is one. Returns how many steps are behind us."""
        latest = self.context.folder.latest_checkpoint()
        if latest is None:
            return 0
        try:
            saved = json.loads((latest.path / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{latest.path} is damaged: {error} (delete it to resume from an earlier one)") from error
        await self.policy.load(latest.path)
        for name, model in self.side_models.items():
            await model.load(latest.path / name)
        self.restore(saved["pipeline"])
        self.evals = {int(step): values for step, values in saved["evals"].items()}
        self.context.view.note(f"resumed from {latest.path} after {saved['steps']} steps")
        self._checkpoints.last_step = int(saved["steps"])
        return self._checkpoints.last_step


def _is_due(num_steps: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after this many."""
    return bool(every) and num_steps % every == 0
