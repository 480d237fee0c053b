"""From a config to a finished run: opens the run folder and the pipeline, and runs the training loop."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from reroll.config.imports import import_object, search_in
from reroll.config.pipeline import PipelineConfig
from reroll.config.registry import entry_names, load_entry
from reroll.config.tree import RlvrConfig
from reroll.data.sources import SourceRows, load_eval
from reroll.errors import ConfigError, RerollError, RunFolderError, Violation
from reroll.observe.files import read_jsonl
from reroll.observe.metrics import Stats
from reroll.observe.progress import TrainView, progress_bar
from reroll.observe.run_folder import Checkpoint, RunFolder, hold_folder
from reroll.observe.trackers import make_tracker
from reroll.pipeline.base import Interrupted, Outcome, Pipeline, RunContext
from reroll.pipeline.checkpoints import Checkpoints
from reroll.pipeline.controls import Companion
from reroll.pipeline.episode_runner import open_episode_runner
from reroll.pipeline.evaluate import EvalResult, num_episodes
from reroll.pipeline.preflight import preflight
from reroll.pipeline.restarts import Restarts
from reroll.pipeline.resume import STATE_FILE, finished_before, look_back, read_state
from reroll.runtime import make_runtime
from reroll.runtime.cpu import core_watch
from reroll.runtime.devices import num_usable_cores
from reroll.runtime.foreground import Foreground
from reroll.training.cluster import TrainWorker

log = logging.getLogger(__name__)


def train(
    config: PipelineConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    code_folder: Path | None = None,
    restarts: Restarts | None = None,
    companion: Companion | None = None,
) -> Outcome:
    """Train until the last step or Ctrl-C, which saves the last finished step for `--resume`.

    In a notebook, interrupting the kernel is Ctrl-C. A run that loses workers it needs restarts from its last checkpoint, at
    most `run.restarts` times in vain. `restarts` holds the count for a caller that restarts this process. A `companion`
    watches the run, and can pause, save and stop it. Modules that the config imports are looked up in `code_folder` and the
    working directory. Raises ConfigError with everything that `reroll check` would find, before anything is changed.
    """
    code_folder = code_folder or Path()
    place = RunFolder.place_of(config.run, resume=resume, overwrite=overwrite)
    checked = preflight(config, code_folder=code_folder)
    notes = [f"note: {note}" for note in checked.notes]
    resolved = config.model_dump(mode="json")
    restarts = restarts or Restarts()
    with hold_folder(place, waits=resume) as lock, companion.beside(place) if companion else nullcontext():
        while True:
            folder = RunFolder.create(config.run, resolved=resolved, resume=resume, overwrite=overwrite, lock=lock)
            restarts.begin(config.run.restarts)
            notes += look_back(folder, config, resolved) if resume else []
            if resume and (outcome := _finished_before(folder, config.run.steps)):
                return outcome
            try:
                return _train_in(
                    folder,
                    config,
                    resolved,
                    notes=notes,
                    rows=checked.rows,
                    code_folder=code_folder,
                    restarts=restarts,
                    companion=companion,
                )
            except RerollError as error:
                if not restarts.heal(error):
                    raise
                what = str(error).partition(". ")[0]
            log.warning(restarts.told(what))
            notes, resume, overwrite = [f"restart {restarts.num}: {what}"], True, False
            gc.collect()  # The error kept the run's objects alive.
            time.sleep(restarts.pause_s)


def _finished_before(folder: RunFolder, num_steps: int) -> Outcome | None:
    """The outcome of a run that has no step left; None if it has."""
    if not (found := finished_before(folder, num_steps)):
        return None
    checkpoint, state, result = found
    evals = {int(step): values for step, values in state["evals"].items()}
    return Outcome(folder.path, checkpoint.path, checkpoint.step, result["seconds"], interrupted=False, evals=evals)


def pipeline_of(config: PipelineConfig) -> type[Pipeline[Any]]:
    """The pipeline class for this config: the one that its config class names, or the user's own."""
    found: type[Pipeline[Any]]
    if isinstance(config, RlvrConfig) and config.recorded:
        found = load_entry("reroll.recorded", "pipeline")
    else:
        found = import_object(config.pipeline if ":" in config.pipeline else config.runs)
    return found


def _train_in(
    folder: RunFolder,
    config: PipelineConfig,
    resolved: dict[str, Any],
    *,
    notes: list[str],
    rows: SourceRows,
    code_folder: Path,
    restarts: Restarts,
    companion: Companion | None,
) -> Outcome:
    latest = folder.latest_checkpoint()
    start_step = latest.step if latest else 0
    tracker = make_tracker(config.run.trackers, folder, config=resolved, start_step=start_step)
    title = f"{config.run.name}: {pipeline_of(config).title}"
    started_s = time.perf_counter()
    try:
        with TrainView(config.run.steps, title, start_step=start_step) as view:
            context, foreground = RunContext(folder, tracker, view, code_folder, notes, restarts, rows), Foreground()
            try:
                outcome = foreground.run(_train(config, context, foreground, companion))
            except Exception as error:
                _leave_reason(context, error, seconds=time.perf_counter() - started_s)
                raise
    finally:
        tracker.close()
    for name in entry_names("reroll.reports"):
        load_entry("reroll.reports", name)(folder, title=title)
    folder.write_result(outcome.as_dict())
    return outcome


def _leave_reason(context: RunContext, error: Exception, *, seconds: float) -> None:
    """Write the reason of a failure into the run folder; a resume that could not even begin leaves the folder as it was."""
    folder = context.folder
    if not folder.has_begun:
        return
    latest = folder.latest_checkpoint()
    result = {
        "status": "failed",
        "steps": context.num_steps,
        "seconds": round(seconds, 1),
        "restarts": context.restarts.num,
        "error": type(error).__name__,
        "reason": str(error),
        "checkpoint": str(latest.path) if latest else None,
    }
    try:
        folder.check_owned()
        folder.write_result(result)
    except RunFolderError as failure:  # This may be why the run failed.
        log.warning("the reason could not be written down: %s", failure)


async def _train(config: PipelineConfig, context: RunContext, foreground: Foreground, companion: Companion | None) -> Outcome:
    def ask_to_stop() -> None:
        context.view.note("stopping: the current update is finished and saved (Ctrl-C again quits at once)")
        context.stop.set()

    hands = context.controls.hands(stop=ask_to_stop)
    with companion.holding(hands) if companion else nullcontext() as told:
        if told:
            context.view.note(told)
        async with pipeline_of(config).open(config, context) as pipeline:
            with gc_frozen(), foreground.on_interrupt(ask_to_stop):
                return await TrainLoop(pipeline).run()


class TrainLoop:
    """The loop of every pipeline: step, evaluate and checkpoint when due, log, stop cleanly."""

    def __init__(self, pipeline: Pipeline[Any]) -> None:
        self._pipeline, self._context, self._config = pipeline, pipeline.context, pipeline.config
        self._checkpoints = Checkpoints(self._context.folder, self._config.checkpoint)
        self._evals: dict[int, dict[str, float]] = {}
        """Held-out metrics by number of finished steps."""
        self._num_updates = 0
        """Updates of all models, as of the last finished step."""

    async def run(self) -> Outcome:
        """Run to the last step, or until the user stops it. The last finished step is saved at the end, also after an error,
        unless the next step has already changed the weights.
        """
        started = time.perf_counter()
        context = self._context
        context.num_steps = await self._resume()
        await self._pipeline.start(context.num_steps)
        try:
            if context.num_steps == 0:
                await self._evaluate_and_log(0)
        except Interrupted:
            pass  # The loop sees the same request and stops with a checkpoint of step 0.
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
            evals=self._evals,
            restarts=context.restarts.num,
        )

    async def _loop(self) -> None:
        """Take steps until the last one, or until the user stops the run."""
        total = self._pipeline.last_step
        while (num_steps := self._context.num_steps) < total and not self._context.stop.is_set():
            await self._checkpoints.raise_if_failed()
            self._context.folder.check_owned()
            try:
                await self._heed_wishes(num_steps)
                num_steps = await self._step_and_log(num_steps)
                if num_steps == total:
                    await self._pipeline.finish()
                if num_steps == total or _is_due(num_steps, self._pipeline.eval_every):
                    await self._evaluate_and_log(num_steps)
            except Interrupted:
                break
            if num_steps < total and _is_due(num_steps, self._config.checkpoint.every):
                self._context.tracker.log(num_steps, await self._take_checkpoint(num_steps))

    async def _heed_wishes(self, num_steps: int) -> None:
        """Between two steps: save if the user asked for it, and wait while the run is paused. Raises Interrupted."""
        controls, view = self._context.controls, self._context.view
        while True:
            if controls.take_checkpoint_wish() and num_steps != self._checkpoints.last_step:
                self._context.tracker.log(num_steps, await self._take_checkpoint(num_steps))
            if not controls.is_paused:
                return
            with view.doing(lambda: f"paused after {num_steps} steps"):
                await self._context.unless_stopped(controls.changed())

    async def _save_in_spite_of(self, error: Exception) -> None:
        """Save the last finished step of a run that ends with an error. Older checkpoints are kept: this one may be bad.

        Nothing is saved if the run folder itself failed, or if the weights are half-way through a step.
        """
        num_steps, view = self._context.num_steps, self._context.view
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
        """Take one step and log its metrics. Returns the number of finished steps."""
        started = time.perf_counter()
        take_step = self._profiled_step if step + 1 in self._config.run.profile_steps else self._pipeline.step
        stats = await take_step(step)
        self._context.num_steps, self._num_updates = step + 1, self._count_updates()
        self._context.restarts.reached(step + 1)
        seconds = time.perf_counter() - started
        values = stats.values_by_name()
        watch = core_watch()
        core_wait = watch.take_wait() if watch else 0.0
        values |= {
            "time/step_s": seconds,
            "throughput/tokens_per_s": values["tokens"] / seconds,
            "machine/core_wait": core_wait,
            "machine/cores": num_usable_cores(),
            "machine/threads": torch.get_num_threads(),
            "run/restarts": self._context.restarts.num,
        }
        self._context.tracker.log(step + 1, values)
        self._context.view.update(step + 1, values, remark=watch.remark(core_wait) if watch else "")
        return step + 1

    async def _profiled_step(self, step: int) -> Stats:
        policy = self._pipeline.policy
        await policy.broadcast(TrainWorker.profile, self._context.folder.path.absolute() / "profile" / f"step-{step + 1:06}")
        stats = await self._pipeline.step(step)
        await policy.broadcast(TrainWorker.profile, None)
        return stats

    def _count_updates(self) -> int:
        return sum(model.num_updates for model in self._pipeline.models.values())

    async def _evaluate_and_log(self, num_steps: int) -> None:
        values = (await self._pipeline.evaluate()).values_by_name()
        if values:
            self._evals[num_steps] = values
            self._context.tracker.log(num_steps, values)
            self._context.view.update(num_steps, values)

    async def _take_checkpoint(self, num_steps: int, *, keep_all: bool = False) -> dict[str, float]:
        """Take a checkpoint. Returns how long it held the run up, as metrics."""
        state = {"steps": num_steps, "evals": self._evals, "pipeline": self._pipeline.state()}
        return await self._checkpoints.take(num_steps, self._pipeline.models, state, keep_all=keep_all)

    async def _last_checkpoint(self, num_steps: int) -> Path:
        """The checkpoint of the last step, on disk."""
        if num_steps == self._checkpoints.last_step:
            await self._checkpoints.finish()
        else:
            times = await self._take_checkpoint(num_steps)
            times["time/checkpoint_wait_s"] += await self._checkpoints.finish()
            self._context.tracker.log(num_steps, times)
        latest = self._context.folder.latest_checkpoint()
        assert latest is not None
        return latest.path

    async def _resume(self) -> int:
        """Load the newest checkpoint, if there is one. Returns the number of finished steps.

        The run's files change only after that: a resume that fails leaves them as they were.
        """
        folder, view = self._context.folder, self._context.view
        latest, first = folder.latest_checkpoint(), self._pipeline.begins_from
        if latest is not None:
            saved = await self._load(latest)
            self._evals = {int(step): values for step, values in saved["evals"].items()}
            self._checkpoints.last_step = latest.step
            view.note(f"resumed from {latest.path} after {latest.step} steps")
        elif first is not None:
            await self._load(first)
            view.note(f"begun from {first.path}, after {first.step} steps of that run")
        elif not folder.has_begun:
            self._pipeline.restart()
        for note in self._context.notes:
            view.note(note)
        folder.go_on()
        view.recall(read_jsonl(folder.metrics_path))
        begun = latest or first
        return begun.step if begun else 0

    async def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load its models and the pipeline's state. Returns the rest of its state file."""
        saved = read_state(checkpoint)
        for name in self._pipeline.side_models:
            if not (checkpoint.path / name).is_dir():
                raise RunFolderError(
                    f"{checkpoint.path} holds no {name}, which this run trains beside the policy: resume with the algorithm "
                    "that wrote it, or start a new run with policy.model set to that folder"
                )
        for name, model in self._pipeline.models.items():
            await model.load(checkpoint.path / name)
        fresh = self._pipeline.state().keys() - saved["pipeline"].keys()
        try:
            self._pipeline.restore(saved["pipeline"])
        except KeyError as error:
            raise RunFolderError(
                f"{checkpoint.path / STATE_FILE} has no {error}: it was written by another version of reroll, or by hand "
                "(resume with the version that wrote it, or start a new run with policy.model set to that folder)"
            ) from error
        self._context.notes += [f"{STATE_FILE} has no {name}, as an earlier version wrote it: it starts anew" for name in fresh]
        self._num_updates = self._count_updates()
        return saved


def _is_due(num_steps: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) is due after `num_steps`."""
    return bool(every) and num_steps % every == 0


def evaluate(config: PipelineConfig, *, code_folder: Path | None = None) -> EvalResult:
    """Play the held-out prompts (`data.eval`) with `policy.model`, with a progress bar.

    Modules that the config imports are looked for in `code_folder` and the working directory.
    """
    if not isinstance(config, RlvrConfig):
        problem = f"is {config.pipeline}, which has no rewards to judge by"
        raise ConfigError([Violation("pipeline", problem, "give an rlvr config")])
    if not config.data.eval:
        raise ConfigError([Violation("data.eval", "is empty", "add held-out prompts")])
    code_folder = code_folder or Path()
    search_in([code_folder, Path()])
    return Foreground().run(_evaluate(config, code_folder))


async def _evaluate(config: RlvrConfig, code_folder: Path) -> EvalResult:
    held_out = load_eval(config.data, rows={})
    async with make_runtime(config.runtime) as runtime, open_episode_runner(config, runtime, code_folder) as runner:
        with progress_bar(f"evaluating {config.policy.model}", num_episodes(held_out, config.eval)) as advance:
            return await runner.evaluate(held_out, config.eval, seed=config.run.seed, on_done=advance)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Inside, the garbage collector ignores all objects that existed before.

    Modules, models and engines are half a million long-lived objects. Scanning them takes 0.2 s or more, in which no thread
    runs, and thousands of samples would trigger the scan again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
