"""From a checked config to a finished run: builds the pieces, runs the pipeline, leaves the folder behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from reroll.config.parts import PolicyConfig
from reroll.config.tree import RlvrConfig, SftConfig
from reroll.data.sampler import Sampler
from reroll.data.sources import load_conversations, load_eval, load_train
from reroll.errors import ConfigError, DataError, Violation
from reroll.models.load import load_tokenizer
from reroll.observe.curve import draw_curve
from reroll.observe.ledger import Ledger
from reroll.observe.progress import TrainView, progress_bar
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import make_tracker
from reroll.pipeline.base import Outcome, RunContext
from reroll.pipeline.evaluate import EvalResult
from reroll.pipeline.player import open_player
from reroll.pipeline.rlvr import Parts, RlvrPipeline
from reroll.pipeline.sft import SftPipeline
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime
from reroll.runtime.devices import DeviceMap
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.train.cluster import TrainCluster
from reroll.train.worker import TrainWorker
from reroll.types import Sample
from reroll.weights.sync import WeightSync


def train(
    config: RlvrConfig | SftConfig, *, resume: bool = False, overwrite: bool = False, code_folder: Path | None = None
) -> Outcome:
    """Run a config to its end, or until Ctrl-C: then the last finished step is saved and `--resume` goes on from it.

    Modules that the config imports are looked for in `code_folder` and the working directory.
    """
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


async def _train(config: RlvrConfig | SftConfig, context: RunContext, code_folder: Path) -> Outcome:
    build = build_rlvr(config, context, code_folder) if isinstance(config, RlvrConfig) else build_sft(config, context)
    async with build as pipeline:
        with _stop_on_interrupt(context):
            return await pipeline.run()


@asynccontextmanager
async def build_rlvr(config: RlvrConfig, context: RunContext, code_folder: Path) -> AsyncIterator[RlvrPipeline]:
    """Read what can be read first, so that bad input ends the run before a model is loaded."""
    prompts, held_out = load_train(config.data, seed=config.run.seed), load_eval(config.data)
    async with make_runtime(config.runtime) as runtime, open_player(config, runtime, code_folder) as player:
        total_steps = config.run.steps * config.train.epochs * config.train.mini_batches
        policy = await spawn_policy(runtime, config.policy, role="policy", total_steps=total_steps)
        reference = await spawn_policy(runtime, config.policy, role="reference", total_steps=1) if config.kl.coef else None
        # With a staleness budget the engine writes while the policy is updated: it needs weights of its own.
        weights = WeightSync(policy, player.engine, snapshot=runtime.shares_memory and config.rollout.max_staleness > 0)
        devices = DeviceMap(
            {"policy": runtime.devices(config.policy.devices)[:1], "engine": runtime.devices(config.engine.devices)}
        )
        devices.set_hooks("engine", on_enter=player.engine.resume, on_leave=player.engine.pause)
        with Ledger(context.folder.ledger_path) as ledger:
            rollouts = RolloutScheduler(
                config.rollout, prompts, episode=player.episode, score=player.score, ledger=ledger, seed=config.run.seed
            )
            try:
                yield RlvrPipeline(config, context, Parts(policy, reference, player, rollouts, weights, devices, held_out))
            finally:
                await rollouts.close()


@asynccontextmanager
async def build_sft(config: SftConfig, context: RunContext) -> AsyncIterator[SftPipeline]:
    """Tokenise every row before the model is loaded: a bad one ends the run at once."""
    renderer = Renderer(load_tokenizer(config.policy.model))
    sources = [(_rows(config, renderer, index), source.weight) for index, source in enumerate(config.data.train)]
    held_out = [sample for index in range(len(config.data.eval)) for sample in _rows(config, renderer, index, held_out=True)]
    rows = Sampler(sources, seed=config.run.seed, shuffle=config.data.shuffle)
    async with make_runtime(config.runtime) as runtime:
        policy = await spawn_policy(runtime, config.policy, role="policy", total_steps=config.run.steps)
        yield SftPipeline(config, context, policy, rows, held_out)


async def spawn_policy(runtime: Runtime, policy: PolicyConfig, *, role: str, total_steps: int) -> TrainCluster:
    """A model to train, or to hold fixed."""
    placement = Placement(role, runtime.devices(policy.devices)[:1])
    return TrainCluster(await runtime.spawn(TrainWorker, placement, policy, total_steps=total_steps))


def evaluate(config: RlvrConfig | SftConfig, *, code_folder: Path | None = None) -> EvalResult:
    """Play the held-out prompts (`data.eval`) with `policy.model`, with a progress bar."""
    if not isinstance(config, RlvrConfig):
        raise ConfigError([Violation("pipeline", "is sft, which has no rewards to judge by", "give an rlvr config")])
    if not config.data.eval:
        raise ConfigError([Violation("data.eval", "is empty", "add held-out prompts")])
    return asyncio.run(_evaluate(config, code_folder or Path()))


async def _evaluate(config: RlvrConfig, code_folder: Path) -> EvalResult:
    held_out = load_eval(config.data)
    async with make_runtime(config.runtime) as runtime, open_player(config, runtime, code_folder) as player:
        with progress_bar(f"evaluating {config.policy.model}", len(held_out) * config.eval.samples) as advance:
            return await player.evaluate(held_out, config.eval, seed=config.run.seed, on_done=advance)


def _rows(config: SftConfig, renderer: Renderer, index: int, *, held_out: bool = False) -> list[Sample]:
    """A source's conversations as training rows. A row that is too long is an error: cutting it would teach half an answer."""
    source = (config.data.eval if held_out else config.data.train)[index]
    samples = []
    for number, conversation in enumerate(load_conversations(source), start=1):
        ids, mask = renderer.training_row(conversation)
        if len(ids) > config.max_tokens:
            raise DataError(
                f"data.{'eval' if held_out else 'train'}.{index}: row {number} has {len(ids)} tokens, more than max_tokens "
                f"{config.max_tokens}: raise max_tokens, or drop the row"
            )
        samples.append(sft_sample(ids, mask))
    return samples


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
