"""From a checked config to a finished run: builds the pieces, runs the pipeline, leaves the folder behind."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reroll.config.imports import import_object, search_in
from reroll.config.tree import AnyConfig, RlvrConfig
from reroll.data.sources import load_eval
from reroll.errors import ConfigError, RerollError, RunFolderError, Violation
from reroll.observe.curve import draw_curve
from reroll.observe.lock import WAIT_S, RunLock
from reroll.observe.progress import TrainView, progress_bar
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import make_tracker
from reroll.pipeline.base import Outcome, Pipeline, RunContext
from reroll.pipeline.distill import DistillPipeline
from reroll.pipeline.episode_runner import open_episode_runner
from reroll.pipeline.evaluate import EvalResult, num_episodes
from reroll.pipeline.preference import DpoPipeline, RewardModelPipeline
from reroll.pipeline.preflight import preflight
from reroll.pipeline.restarts import Restarts
from reroll.pipeline.resume import finished_before, look_back
from reroll.pipeline.rlvr import RlvrPipeline
from reroll.pipeline.sft import SftPipeline
from reroll.runtime import make_runtime
from reroll.runtime.foreground import Foreground

log = logging.getLogger(__name__)


def train(
    config: AnyConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    code_folder: Path | None = None,
    restarts: Restarts | None = None,
) -> Outcome:
    """Run a config to its end, or until Ctrl-C: then the last finished step is saved and `--resume` goes on from it.

    In a notebook, interrupting the kernel is Ctrl-C. A run that loses workers which it cannot do without is started anew, and
    goes on, as often as `run.restarts` allows; `restarts` counts, for a caller that starts this process anew.
    Modules that the config imports are looked for in `code_folder` and the working directory.
    Raises ConfigError with everything that `reroll check` would find, and has then changed nothing.
    """
    code_folder = code_folder or Path()
    place = RunFolder.place_of(config.run, resume=resume, overwrite=overwrite)
    notes = [f"note: {note}" for note in preflight(config, code_folder=code_folder)]
    resolved = config.model_dump(mode="json")
    restarts = restarts or Restarts()
    with RunLock(place, wait_s=WAIT_S if resume else 0.0) as lock:
        while True:
            folder = RunFolder.create(config.run, resolved=resolved, resume=resume, overwrite=overwrite, lock=lock)
            restarts.begin(config.run.restarts)
            notes += look_back(folder, config, resolved) if resume else []
            if resume and (outcome := _finished_before(folder, config.run.steps)):
                return outcome
            try:
                return _train_in(folder, config, resolved, notes=notes, code_folder=code_folder, restarts=restarts)
            except RerollError as error:
                if not restarts.heal(error):
                    raise
                what = str(error).partition(". ")[0]
            log.warning(restarts.told(what))
            notes, resume, overwrite = [f"restart {restarts.num}: {what}"], True, False
            gc.collect()  # The error held on to all that the run was made of.
            time.sleep(restarts.pause_s)


def _finished_before(folder: RunFolder, num_steps: int) -> Outcome | None:
    """How a run ended that has no step left to do."""
    if not (found := finished_before(folder, num_steps)):
        return None
    checkpoint, state, result = found
    evals = {int(step): values for step, values in state["evals"].items()}
    return Outcome(folder.path, checkpoint.path, checkpoint.step, result["seconds"], interrupted=False, evals=evals)


PIPELINES: dict[str, type[Pipeline[Any]]] = {
    "rlvr": RlvrPipeline,
    "agentic": RlvrPipeline,
    "sft": SftPipeline,
    "dpo": DpoPipeline,
    "reward_model": RewardModelPipeline,
    "distill": DistillPipeline,
}
"""Those that come with the library, by their name in a config."""


def pipeline_of(config: AnyConfig) -> type[Pipeline[Any]]:
    """The class that runs the config: one of ours, or the user's own."""
    if config.pipeline in PIPELINES:
        return PIPELINES[config.pipeline]
    own: type[Pipeline[Any]] = import_object(config.pipeline)
    return own


def _train_in(
    folder: RunFolder,
    config: AnyConfig,
    resolved: dict[str, Any],
    *,
    notes: list[str],
    code_folder: Path,
    restarts: Restarts,
) -> Outcome:
    latest = folder.latest_checkpoint()
    start_step = latest.step if latest else 0
    tracker = make_tracker(config.run.trackers, folder, config=resolved, start_step=start_step)
    title = f"{config.run.name}: {pipeline_of(config).title}"
    started_s = time.perf_counter()
    try:
        with TrainView(config.run.steps, title, start_step=start_step) as view:
            context, foreground = RunContext(folder, tracker, view, code_folder, notes, restarts), Foreground()
            try:
                outcome = foreground.run(_train(config, context, foreground))
            except Exception as error:
                _leave_reason(context, error, seconds=time.perf_counter() - started_s)
                raise
    finally:
        tracker.close()
    draw_curve(folder.metrics_path, folder.curve_path, title=title)
    folder.write_result(outcome.as_dict())
    return outcome


def _leave_reason(context: RunContext, error: Exception, *, seconds: float) -> None:
    """Write into a run's folder why it failed. One that could not even go on leaves what the run before it wrote."""
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
    except RunFolderError as failure:  # It may be the very reason.
        log.warning("the reason could not be written down: %s", failure)


async def _train(config: AnyConfig, context: RunContext, foreground: Foreground) -> Outcome:
    def ask_to_stop() -> None:
        context.view.note("stopping: the current update is finished and saved (Ctrl-C again quits at once)")
        context.stop.set()

    async with pipeline_of(config).open(config, context) as pipeline:
        with settled_heap(), foreground.on_interrupt(ask_to_stop):
            return await pipeline.run()


def evaluate(config: AnyConfig, *, code_folder: Path | None = None) -> EvalResult:
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
    held_out = load_eval(config.data)
    async with make_runtime(config.runtime) as runtime, open_episode_runner(config, runtime, code_folder) as runner:
        with progress_bar(f"evaluating {config.policy.model}", num_episodes(held_out, config.eval)) as advance:
            return await runner.evaluate(held_out, config.eval, seed=config.run.seed, on_done=advance)


@contextmanager
def settled_heap() -> Iterator[None]:
    """While this is open, the garbage collector passes over all objects that were there before.

    Modules, models and engines are half a million objects that stay. To look through them takes 0.2 s and more, in which no
    thread runs, and thousands of samples make the collector look again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
