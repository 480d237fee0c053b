"""Puts an RL run together: which models it needs, where they live, who shares what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from reroll.config.advantages import RemaxAdvantage
from reroll.config.algorithm import OwnCritic, SharedCritic
from reroll.config.tree import RlvrConfig
from reroll.data.sources import load_eval, load_train
from reroll.infer.cluster import InferCluster
from reroll.models.load import Head
from reroll.models.vocabulary import shared_vocabulary
from reroll.observe.ledger import Ledger
from reroll.pipeline.base import RunContext
from reroll.pipeline.player import open_player
from reroll.pipeline.rlvr import Parts, RlvrPipeline
from reroll.pipeline.spawn import reference_of, spawn_fixed, spawn_model, train_devices
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime import make_runtime
from reroll.runtime.base import Runtime
from reroll.runtime.devices import DeviceMap
from reroll.runtime.plan.roles import engine_ranks
from reroll.runtime.plan.search import assign_devices
from reroll.train.cluster import TrainCluster
from reroll.weights.sync import WeightSync


@asynccontextmanager
async def open_rlvr(config: RlvrConfig, context: RunContext, code_folder: Path) -> AsyncIterator[RlvrPipeline]:
    """Read what can be read first, so that bad input ends the run before a model is loaded."""
    prompts, held_out = load_train(config.data, seed=config.run.seed), load_eval(config.data)
    for teacher in config.teachers.values():
        shared_vocabulary(config.policy.model, teacher.model)
    run_folder = context.folder.path
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(make_runtime(config.runtime))
        config = assign_devices(config, num_gpus=runtime.num_gpus)
        player = await stack.enter_async_context(open_player(config, runtime, code_folder, run_folder=run_folder))
        head: Head = "language+score" if isinstance(config.critic, SharedCritic) else "language"
        policy = await spawn_model(runtime, config.policy, role="policy", total_steps=_num_updates(config), head=head)
        # With a staleness budget the engine writes while the policy is updated: it needs weights of its own.
        snapshot = runtime.shares_memory and config.rollout.max_staleness > 0
        weights = WeightSync(
            policy,
            player.engine,
            config.weights,
            share_memory=runtime.shares_memory,
            snapshot=snapshot,
            host=runtime.host,
            folder=run_folder / "weights",
        )
        devices = _device_map(config, runtime, policy, player.engine)
        greedy = player.greedy_episode if isinstance(config.advantage, RemaxAdvantage) else None
        with Ledger(context.folder.ledger_path) as ledger:
            rollouts = RolloutScheduler(
                config.rollout,
                prompts,
                episode=player.episode,
                score=player.score,
                ledger=ledger,
                seed=config.run.seed,
                greedy=greedy,
            )
            parts = Parts(
                policy=policy,
                reference=await reference_of(runtime, config.policy, policy) if config.kl.coef else None,
                critic=await _critic(config, runtime, policy),
                teachers={
                    name: await spawn_fixed(runtime, teacher, role=f"teacher {name}")
                    for name, teacher in config.teachers.items()
                },
                player=player,
                rollouts=rollouts,
                weights=weights,
                devices=devices,
                held_out=held_out,
            )
            try:
                yield RlvrPipeline(config, context, parts)
            finally:
                await rollouts.close()


def _device_map(config: RlvrConfig, runtime: Runtime, policy: TrainCluster, engine: InferCluster) -> DeviceMap:
    """Who takes turns on which devices, and what each does when it leaves them."""
    seats = engine_ranks(config.engine, runtime.devices(config.engine.devices))
    devices = DeviceMap({"policy": train_devices(runtime, config.policy), "engine": seats}, apart=["engine"])
    if config.engine.offload == "all":
        devices.set_hooks("engine", on_enter=engine.wake, on_leave=engine.sleep)
    else:
        devices.set_hooks("engine", on_enter=engine.resume, on_leave=engine.pause)
    if config.policy.offload != "none":
        weights = config.policy.offload == "all"
        devices.set_hooks(
            "policy",
            on_enter=lambda ranks: policy.to(None, weights=weights),
            on_leave=lambda ranks: policy.to("cpu", weights=weights),
        )
    return devices


def _num_updates(config: RlvrConfig) -> int:
    return config.run.steps * config.train.epochs * config.train.mini_batches


async def _critic(config: RlvrConfig, runtime: Runtime, policy: TrainCluster) -> TrainCluster | None:
    if not isinstance(config.critic, OwnCritic):
        return policy if config.critic else None
    critic = config.critic.model_copy(update={"model": config.critic.model or config.policy.model})
    return await spawn_model(runtime, critic, role="critic", total_steps=_num_updates(config), head="score")
