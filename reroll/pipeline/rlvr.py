"""RL with verifiable rewards: sample groups, score them, update the policy, publish its weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reroll.algo.advantages import ADVANTAGES
from reroll.config.algorithm import AdvantageConfig
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.pipeline.player import Player
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.devices import DeviceMap
from reroll.tokens.batch import pack
from reroll.tokens.samples import samples_of
from reroll.train.cluster import TrainCluster
from reroll.train.loss import PolicyLoss
from reroll.types import Group, Prompt, Sample, Status
from reroll.weights.sync import WeightSync


@dataclass(frozen=True, slots=True)
class Parts:
    """Who does what in an RL run."""

    policy: TrainCluster
    reference: TrainCluster | None
    """The starting policy, where a KL penalty needs it."""
    player: Player
    rollouts: RolloutScheduler
    weights: WeightSync
    devices: DeviceMap
    held_out: list[Prompt]


class RlvrPipeline(Pipeline[RlvrConfig]):
    """One loop for synchronous and asynchronous training: the staleness budget is the only difference."""

    def __init__(self, config: RlvrConfig, context: RunContext, parts: Parts) -> None:
        super().__init__(config, context)
        self.parts = parts
        self.policy = parts.policy
        self.rollouts = parts.rollouts
        self.loss = PolicyLoss.from_config(config.loss, aggregation=config.aggregation, kl=config.kl)

    async def step(self, step: int) -> Stats:
        started = time.perf_counter()
        groups = await self.context.unless_stopped(self.rollouts.take(self.config.rollout.prompts_per_step))
        waited = Stats({"time/wait_s": Last(time.perf_counter() - started)})
        batch = pack(assign_advantages(groups, self.config.advantage), temperature=self.config.rollout.temperature)

        if self.config.rollout.max_staleness:
            batch = batch.replace(old_logp=batch.logp)  # stale samples are weighed against the policy that drew them

        async with self.parts.devices.lease("policy"):
            if self.parts.reference:
                batch = batch.replace(ref_logp=await self.parts.reference.logprobs(batch))
            train = self.config.train
            trained = await self.policy.train(batch, self.loss, epochs=train.epochs, mini_batches=train.mini_batches, seed=step)

        async with self.parts.devices.lease("engine"):
            pushed = await self.parts.weights.push(version=step + 1)
        self.rollouts.release(groups, version=step + 1)  # slots free only now: nothing is born stale
        self._log_samples(groups, step + 1)
        return waited + trained + pushed + rollout_stats(groups) + self.rollouts.stats() + self.parts.player.engine.stats()

    async def start(self, num_steps: int) -> None:
        async with self.parts.devices.lease("engine"):
            await self.parts.weights.push(version=num_steps)

    async def finish(self) -> None:
        await self.rollouts.close()

    async def evaluate(self) -> Stats:
        prompts, settings = self.parts.held_out, self.config.eval
        if not prompts:
            return Stats()
        with self.context.view.task("evaluating", len(prompts) * settings.samples) as advance:
            playing = self.parts.player.evaluate(prompts, settings, seed=self.config.run.seed, on_done=advance)
            return (await self.context.unless_stopped(playing)).stats()

    def is_eval_due(self, num_steps: int) -> bool:
        every = self.config.eval.every
        return bool(every) and num_steps % every == 0

    def state(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rollouts.restore(state["rollouts"])

    def _log_samples(self, groups: Sequence[Group], num_steps: int) -> None:
        pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        for prompt, trajectory in pairs[: self.config.run.log_samples]:
            self.context.folder.log_sample(num_steps, prompt, trajectory)


def assign_advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[Sample]:
    """Each group's rewards to advantages, its trajectories to training rows."""
    options = config.model_dump(exclude={"kind"})
    rows = []
    for group in groups:
        advantages = ADVANTAGES[config.kind](torch.tensor(group.rewards, dtype=torch.float32), **options)
        rows += samples_of(group, advantages.tolist())
    return rows


def rollout_stats(groups: Sequence[Group]) -> Stats:
    """What the samples of a step were like."""
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    count = float(len(everything))
    tokens = float(sum(trajectory.num_completion_tokens for trajectory in everything))
    rewards = torch.tensor([trajectory.reward for trajectory in everything], dtype=torch.float64)
    stats = Stats(
        {
            "reward/mean": Mean(float(rewards.sum()), count),
            "reward/std": Last(float(rewards.std(correction=0))),
            "rollout/completion_tokens": Mean(tokens, count),
            "rollout/truncated": Mean(float(sum(t.status is Status.TRUNCATED for t in everything)), count),
            "rollout/groups_with_signal": Mean(float(sum(group.has_signal for group in groups)), float(len(groups))),
            "tokens": Sum(tokens),
        }
    )
    if len({group.prompt.domain for group in groups}) > 1:
        for group in groups:
            total = Mean(sum(group.rewards), float(len(group.rewards)))
            stats += Stats({f"reward/{group.prompt.domain}": total})
    return stats
