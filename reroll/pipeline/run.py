"""From a checked config to a finished run: builds the pieces, runs the pipeline, leaves the folder behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

from reroll.config.distill import DistillConfig
from reroll.config.imports import search_in
from reroll.config.offline import SftConfig
from reroll.config.preference import DpoConfig, RewardModelConfig
from reroll.config.tree import AnyConfig, RlvrConfig
from reroll.data.sources import load_eval
from reroll.errors import ConfigError, Violation
from reroll.observe.curve import draw_curve
from reroll.observe.progress import TrainView, progress_bar
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import make_tracker
from reroll.pipeline.base import Outcome, Pipeline, RunContext
from reroll.pipeline.distill import open_distill
from reroll.pipeline.evaluate import EvalResult, num_episodes
from reroll.pipeline.open_rlvr import open_rlvr
from reroll.pipeline.player import open_player
from reroll.pipeline.preference import open_dpo, open_reward_model
from reroll.pipeline.sft import open_sft
from reroll.runtime import make_runtime
from reroll.runtime.heap import settled_heap


def train(config: AnyConfig, *, resume: bool = False, overwrite: bool = False, code_folder: Path | None = None) -> Outcome:
    """Run a config to its end, or until Ctrl-C: then the last finished step is saved and `--resume` goes on from it.

    Modules that the config imports are looked for in `code_folder` and the working directory.
    """
    search_in([code_folder or Path(), Path()])
    resolved = config.model_dump(mode="json")
    folder = RunFolder.create(config.run, resolved=resolved, resume=resume, overwrite=overwrite)
    latest = folder.latest_checkpoint()
    start_step = latest.step if latest else 0
    tracker = make_tracker(config.run.trackers, folder, config=resolved, start_step=start_step)
    title = f"{config.pipeline} {config.run.name}"
    try:
        with TrainView(config.run.steps, title, start_step=start_step) as view:
            outcome = asyncio.run(_train(config, RunContext(folder, tracker, view), code_folder or Path()))
    finally:
        tracker.close()
    draw_curve(folder.metrics_path, folder.curve_path, title=title)
    folder.write_result(outcome.as_dict())
    return outcome


OPENERS: dict[type[AnyConfig], Callable[..., AbstractAsyncContextManager[Pipeline[Any]]]] = {
    RlvrConfig: open_rlvr,
    SftConfig: open_sft,
    DpoConfig: open_dpo,
    RewardModelConfig: open_reward_model,
    DistillConfig: open_distill,
}
"""How each pipeline is put together: `(config, context, code folder) -> the pipeline, while its workers live`."""


async def _train(config: AnyConfig, context: RunContext, code_folder: Path) -> Outcome:
    async with OPENERS[type(config)](config, context, code_folder) as pipeline:
        with settled_heap(), _stop_on_interrupt(context):
            return await pipeline.run()


def evaluate(config: AnyConfig, *, code_folder: Path | None = None) -> EvalResult:
    """Play the held-out prompts (`data.eval`) with `policy.model`, with a progress bar."""
    if not isinstance(config, RlvrConfig):
        problem = f"is {config.pipeline}, which has no rewards to judge by"
        raise ConfigError([Violation("pipeline", problem, "give an rlvr config")])
    if not config.data.eval:
        raise ConfigError([Violation("data.eval", "is empty", "add held-out prompts")])
    return asyncio.run(_evaluate(config, code_folder or Path()))


async def _evaluate(config: RlvrConfig, code_folder: Path) -> EvalResult:
    held_out = load_eval(config.data)
    async with make_runtime(config.runtime) as runtime, open_player(config, runtime, code_folder) as player:
        with progress_bar(f"evaluating {config.policy.model}", num_episodes(held_out, config.eval)) as advance:
            return await player.evaluate(held_out, config.eval, seed=config.run.seed, on_done=advance)


@contextmanager
def _stop_on_interrupt(context: RunContext) -> Iterator[None]:
    """The first Ctrl-C asks for a clean end; the second is Python's own."""
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        context.view.note("stopping: the current update is finished and saved (Ctrl-C again quits at once)")
        context.stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, ask_to_stop)
        loop.add_signal_handler(signal.SIGTERM, ask_to_stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a platform without them
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
