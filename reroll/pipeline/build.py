"""Builds the components of an RL run from its config: models, engines, scheduler, weight sync, device map."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from reroll.config.algorithm import OwnCriticConfig, SharedCriticConfig
from reroll.config.elastic import begin_elastic
from reroll.config.tree import RlvrConfig
from reroll.data.sources import SourceRows, load_eval, load_train
from reroll.infer.cluster import InferCluster
from reroll.models.load import Head, shared_vocabulary
from reroll.observe.journal import JOURNAL_FOLDER, Journal
from reroll.pipeline.episode_runner import EpisodeRunner, open_episode_runner, spawn_engine
from reroll.pipeline.planner import assign_devices
from reroll.pipeline.resume import sampling_fingerprint
from reroll.pipeline.spawn import reference_of, spawn_model, train_devices
from reroll.pipeline.teachers import Teachers, open_teachers, vocabulary_of
from reroll.pipeline.weight_sync import WeightSync
from reroll.rollout.in_flight import TokenKeeper
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime import make_runtime
from reroll.runtime.base import Runtime
from reroll.runtime.devices import DeviceMap
from reroll.training.cluster import TrainCluster
from reroll.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningModels:
    """The models of an update, and the device map."""

    config: RlvrConfig
    """With its devices assigned."""
    policy: TrainCluster
    reference: TrainCluster | None
    """For a KL penalty: the starting policy (the policy without its adapter, if it has one), or another model."""
    critic: TrainCluster | None
    """Predicts returns, if the advantage needs it. It is the policy itself if they share a trunk."""
    teachers: Teachers
    devices: DeviceMap


@dataclass(frozen=True, slots=True, kw_only=True)
class RlvrComponents(LearningModels):
    """The components of an RL run."""

    episode_runner: EpisodeRunner
    rollouts: RolloutScheduler
    weights: WeightSync
    held_out: list[Prompt]

    @property
    def engine(self) -> InferCluster:
        """The engines that generate."""
        return self.episode_runner.engine


@asynccontextmanager
async def build_rlvr(
    config: RlvrConfig, *, folder: Path, code_folder: Path, rows: SourceRows, attempt: int = 1
) -> AsyncIterator[RlvrComponents]:
    """Build the components; their workers live as long as the context. The journal, and weights pushed by files, go into
    `folder`. `rows` are those of sources that were read already; `attempt` is one more than the number of restarts.

    Data is read first, so that bad input is found before a model is loaded.
    """
    prompts, held_out = load_train(config.data, seed=config.run.seed, rows=rows), load_eval(config.data, rows=rows)
    _check_vocabularies(config)
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(make_runtime(config.runtime))
        config = assign_devices(begin_elastic(config, runtime.devices), num_gpus=runtime.num_gpus)
        episode_runner = await stack.enter_async_context(open_episode_runner(config, runtime, code_folder, run_folder=folder))
        policy = await _policy(config, runtime)
        weights = _weight_sync(config, runtime, policy, episode_runner.engine, folder)
        journal = stack.enter_context(_journal(config, folder, episode_runner, attempt))
        kept = replace(episode_runner, generate=TokenKeeper(journal, episode_runner.engine.generate).generate)
        rollouts = RolloutScheduler(
            config.rollout,
            prompts,
            episode=kept.episode,
            score=kept.score,
            journal=journal,
            seed=config.run.seed,
            greedy=kept.greedy_episode if config.has_greedy_baseline else None,
        )
        stack.push_async_callback(rollouts.close)
        yield RlvrComponents(
            config=config,
            policy=policy,
            reference=await _reference(config, runtime, policy),
            critic=await _critic(config, runtime, policy),
            teachers=await open_teachers(config, runtime),
            episode_runner=episode_runner,
            rollouts=rollouts,
            weights=weights,
            devices=_device_map(config, runtime, policy, episode_runner.engine),
            held_out=held_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayComponents(LearningModels):
    """The components of a replay."""

    engine: InferCluster | None
    """For samples that are drawn again."""
    weights: WeightSync | None


@asynccontextmanager
async def build_replay(config: RlvrConfig, *, folder: Path, draw: bool) -> AsyncIterator[ReplayComponents]:
    """Build the components of a replay, with an engine if `draw`; their workers live as long as the context."""
    _check_vocabularies(config)
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(make_runtime(config.runtime))
        config = assign_devices(begin_elastic(config, runtime.devices), num_gpus=runtime.num_gpus)
        policy, engine, weights = await _policy(config, runtime), None, None
        devices = DeviceMap({"policy": train_devices(runtime, config.policy)})
        if draw:
            engine = await spawn_engine(runtime, config.engine, config.policy)
            stack.push_async_callback(engine.close)
            weights = _weight_sync(config, runtime, policy, engine, folder)
            devices = _device_map(config, runtime, policy, engine)
        yield ReplayComponents(
            config=config,
            policy=policy,
            reference=await _reference(config, runtime, policy),
            critic=await _critic(config, runtime, policy),
            teachers=await open_teachers(config, runtime),
            devices=devices,
            engine=engine,
            weights=weights,
        )


def _weight_sync(config: RlvrConfig, runtime: Runtime, policy: TrainCluster, engine: InferCluster, folder: Path) -> WeightSync:
    # With a staleness budget the engine generates while the policy is updated, so it needs a copy of the weights.
    snapshot = runtime.shares_memory and config.rollout.max_staleness > 0
    return WeightSync(
        policy,
        engine,
        config.weights,
        share_memory=runtime.shares_memory,
        snapshot=snapshot,
        host=runtime.host,
        folder=folder / "weights",
    )


def _check_vocabularies(config: RlvrConfig) -> None:
    """Raise ModelError unless the policy, its teachers and its reference share their vocabulary."""
    vocabulary_of(config)
    if config.reference.model:
        shared_vocabulary(config.policy.model, config.reference.model, role="reference")


async def _policy(config: RlvrConfig, runtime: Runtime) -> TrainCluster:
    head: Head = "language+score" if isinstance(config.critic, SharedCriticConfig) else "language"
    return await spawn_model(runtime, config.policy, role="policy", total_steps=_num_updates(config), head=head)


def _journal(config: RlvrConfig, folder: Path, episode_runner: EpisodeRunner, attempt: int) -> Journal:
    max_bytes = None if config.run.journal_gib is None else int(config.run.journal_gib * 2**30)
    return Journal(
        folder / JOURNAL_FOLDER,
        config=sampling_fingerprint(config),
        attempt=attempt,
        text_of=episode_runner.renderer.decode,
        max_bytes=max_bytes,
    )


def _device_map(config: RlvrConfig, runtime: Runtime, policy: TrainCluster, engine: InferCluster) -> DeviceMap:
    """The roles' devices, and the hooks that run when a role enters or leaves them."""
    engines = config.engine.ranks(runtime.devices(config.engine.devices))
    devices = DeviceMap({"policy": train_devices(runtime, config.policy), "engine": engines}, independent=["engine"])
    if config.engine.sleep:
        devices.set_hooks("engine", on_enter=engine.wake, on_leave=engine.sleep)
    else:
        devices.set_hooks("engine", on_enter=engine.resume, on_leave=engine.pause)
    if config.policy.swap != "none":
        weights = config.policy.swap == "all"
        devices.set_hooks(
            "policy",
            on_enter=lambda ranks: policy.to(None, weights=weights),
            on_leave=lambda ranks: policy.to("cpu", weights=weights),
        )
    return devices


def _num_updates(config: RlvrConfig) -> int:
    return config.run.steps * config.train.epochs * config.train.mini_batches


async def _reference(config: RlvrConfig, runtime: Runtime, policy: TrainCluster) -> TrainCluster | None:
    if not config.kl.coef:
        return None
    reference = await reference_of(runtime, config.policy, policy, model=config.reference.model)
    if config.reference.sync_every and config.reference.model:
        await reference.shapes_shared_with(policy)  # Fails early if the shapes differ.
    return reference


async def _critic(config: RlvrConfig, runtime: Runtime, policy: TrainCluster) -> TrainCluster | None:
    if not isinstance(config.critic, OwnCriticConfig):
        return policy if config.critic else None
    critic = config.critic.model_copy(update={"model": config.critic.model or config.policy.model})
    return await spawn_model(runtime, critic, role="critic", total_steps=_num_updates(config), head="score")
