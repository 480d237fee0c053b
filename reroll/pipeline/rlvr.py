"""RL with verifiable rewards: sample groups, score them, update the policy, publish its weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.algo.kl import KL_ESTIMATORS, adapted_coef, k3
from reroll.algo.running import RunningMoments
from reroll.algo.shaping import shape_rewards
from reroll.config.advantages import GaeAdvantage, OptimalTokenBaselineAdvantage
from reroll.config.algorithm import OwnCritic
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.pipeline.credit import advantage_stats, assign_advantages, critic_targets, on_domain_scale, policy_loss_of
from reroll.pipeline.evaluate import num_episodes
from reroll.pipeline.player import Player
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.devices import DeviceMap
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.train.base import Needs, known
from reroll.train.cluster import TrainCluster
from reroll.train.loss import ValueLoss
from reroll.types import Group, Prompt, Status
from reroll.weights.sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Who does what in an RL run."""

    policy: TrainCluster
    reference: TrainCluster | None
    """The starting policy, where a KL penalty needs it: the policy itself if it learns an adapter, which is then left out."""
    critic: TrainCluster | None
    """What foretells returns, where the advantage needs it: the policy itself if they share a trunk."""
    teachers: Mapping[str, TrainCluster]
    player: Player
    rollouts: RolloutScheduler
    weights: WeightSync
    devices: DeviceMap
    held_out: list[Prompt]


_WHOLE_VOCABULARY = 1 << 30


class RlvrPipeline(Pipeline[RlvrConfig]):
    """One loop for synchronous and asynchronous training: the staleness budget is the only difference."""

    def __init__(self, config: RlvrConfig, context: RunContext, parts: Parts) -> None:
        super().__init__(config, context)
        self.parts = parts
        self.policy = parts.policy
        self.critic = parts.critic
        self.rollouts = parts.rollouts
        self.moments = RunningMoments()
        self.domain_moments: dict[str, RunningMoments] = {}
        self.kl_coef = config.kl.coef
        if parts.critic is not None and isinstance(config.critic, OwnCritic):
            self.side_models["critic"] = parts.critic

    async def step(self, step: int) -> Stats:
        started = time.perf_counter()
        groups = await self.context.unless_stopped(self.rollouts.take(self.config.rollout.prompts_per_step))
        waited = Stats({"time/wait_s": Last(time.perf_counter() - started)})
        samples, episodes = rows_of(groups)
        batch = self.with_temperature(pack(samples), episodes, groups)
        if self.config.shaping.domains == "normalised":
            episodes = on_domain_scale(episodes, groups, self.domain_moments)

        async with self.parts.devices.lease("policy"):
            batch, episodes = await self.look_up(batch, episodes)
            taught = await self.taught(batch, episodes, groups)
            batch = assign_advantages(batch, episodes, groups, self.config, taught=taught)
            trained = advantage_stats(batch) + self.watch_kl(batch) + await self.update(batch.without_untrained(), step)

        async with self.parts.devices.lease("engine"):
            pushed = await self.parts.weights.push(version=step + 1)
        self.rollouts.release(groups, version=step + 1)  # slots free only now: nothing is born stale
        self._log_samples(groups, step + 1)
        swapped = Stats({"time/swap_s": Last(self.parts.devices.take_swap_s())})
        return waited + swapped + trained + pushed + rollout_stats(groups) + self._plane_stats()

    def with_temperature(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> Batch:
        """The batch at the temperature it was drawn at: one number, or that of each token where domains differ."""
        by_group = [self.config.rollout.of(group.prompt.domain).temperature for group in groups]
        if len(set(by_group)) == 1:
            return batch.replace(temperature=by_group[0])
        by_episode = torch.tensor(by_group)[episodes.group]
        return batch.replace(temperature=torch.where(batch.loss_mask, episodes.spread(by_episode), 1.0))

    async def look_up(self, batch: Batch, episodes: Episodes) -> tuple[Batch, Episodes]:
        """What reference, critic and policy say about the samples, where the algorithm asks; rewards penalised and shaped."""
        config, kl = self.config, self.config.kl
        if config.old_policy == "sampler" or (config.old_policy == "auto" and config.rollout.max_staleness):
            batch = batch.replace(old_logp=batch.logp)  # samples are weighed against the policy that drew them
        if self.parts.reference:
            top_k = (kl.top_k or _WHOLE_VOCABULARY) if kl.estimator == "full" else 0
            said = await self.parts.reference.predict(batch, Needs(top_k=top_k, adapter=False))
            batch = batch.replace(ref_logp=said.logp, teacher_ids=said.top_ids, teacher_logp=said.top_logp)
            if kl.place == "reward":
                episodes = episodes.penalised(self.kl_coef * KL_ESTIMATORS[kl.estimator](batch.logp, known(said.logp)))
        episodes = shape_rewards(episodes, **config.shaping.rewards.model_dump())
        if self.critic and isinstance(config.advantage, GaeAdvantage):
            episodes = replace(episodes, value=await self.critic.values(batch))
            batch = batch.replace(value=episodes.value, returns=critic_targets(episodes, config.advantage, config.value_loss))
        if isinstance(config.advantage, OptimalTokenBaselineAdvantage):
            said = await self.policy.predict(batch, Needs(logp=False, score_norm=True))
            episodes = replace(episodes, score_norm=said.score_norm)
        self.moments.update(episodes.reward)
        return batch, replace(episodes, running_mean=self.moments.mean, running_std=self.moments.std)

    async def taught(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> Tensor:
        """[T] on-policy distillation: how much likelier each teacher finds a token than the policy that drew it did."""
        bonus = torch.zeros_like(batch.advantage)
        for name, teacher in self.config.teachers.items():
            learns = torch.tensor([teacher.domains is None or group.prompt.domain in teacher.domains for group in groups])
            tokens = episodes.spread(learns[episodes.group].float()) > 0
            sequences = batch.sequence_index[tokens].unique().tolist()  # type: ignore[no-untyped-call]
            if sequences:
                logp = await self.parts.teachers[name].logprobs(batch.select(sequences))
                inside = torch.isin(batch.sequence_index, torch.tensor(sequences))
                bonus[inside] += teacher.coef * (logp - batch.logp[inside])
        return bonus

    async def update(self, batch: Batch, step: int) -> Stats:
        """Train the critic, if it is a model of its own, then the policy."""
        config, train, stats = self.config, self.config.train, Stats()
        if not batch.loss_mask.any():
            return stats  # Every token is masked: momentum alone must not move the policy.
        if isinstance(config.critic, OwnCritic) and self.critic:
            value_loss = ValueLoss(clip=config.value_loss.clip)
            told = await self.critic.train(batch, value_loss, epochs=train.epochs, mini_batches=train.mini_batches, seed=step)
            stats += Stats({name.replace("train", "critic", 1): metric for name, metric in told.items()})
            if step < config.critic.warmup_steps:
                return stats
        loss = policy_loss_of(config, kl_coef=self.kl_coef)
        return stats + await self.policy.train(batch, loss, epochs=train.epochs, mini_batches=train.mini_batches, seed=step)

    def _plane_stats(self) -> Stats:
        """What the scheduler, the engines, the rewards and the environments did since the last step."""
        player = self.parts.player
        stats = self.rollouts.stats() + player.engine.stats() + player.rewards.stats()
        return stats + player.envs.stats() if self.config.envs else stats

    def watch_kl(self, batch: Batch) -> Stats:
        """How far the policy is from where it started; an adaptive coefficient follows it."""
        if batch.ref_logp is None:
            return Stats()
        kl = float(k3(batch.logp, batch.ref_logp)[batch.loss_mask].mean())
        stats = Stats({"kl/reference": Last(kl), "kl/coef": Last(self.kl_coef)})
        if adaptive := self.config.kl.adaptive:
            self.kl_coef = adapted_coef(
                self.kl_coef, kl, target=adaptive.target, horizon=adaptive.horizon, num_samples=len(batch)
            )
        return stats

    async def start(self, num_steps: int) -> None:
        async with self.parts.devices.lease("engine"):
            await self.parts.weights.push(version=num_steps)

    async def finish(self) -> None:
        await self.rollouts.close()

    async def evaluate(self) -> Stats:
        prompts, settings = self.parts.held_out, self.config.eval
        if not prompts:
            return Stats()
        with self.context.view.task("evaluating", num_episodes(prompts, settings)) as advance:
            playing = self.parts.player.evaluate(prompts, settings, seed=self.config.run.seed, on_done=advance)
            return (await self.context.unless_stopped(playing)).stats()

    @property
    def eval_every(self) -> int:
        return self.config.eval.every

    def state(self) -> dict[str, Any]:
        domains = {domain: moments.state() for domain, moments in self.domain_moments.items()}
        rollouts, moments = self.rollouts.state(), self.moments.state()
        return {"rollouts": rollouts, "kl_coef": self.kl_coef, "moments": moments, "domain_moments": domains}

    def restore(self, state: dict[str, Any]) -> None:
        self.rollouts.restore(state["rollouts"])
        self.kl_coef = state["kl_coef"]
        self.moments.restore(state["moments"])
        for domain, moments in state["domain_moments"].items():
            self.domain_moments.setdefault(domain, RunningMoments()).restore(moments)

    def _log_samples(self, groups: Sequence[Group], num_steps: int) -> None:
        pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        decode = partial(self.parts.player.renderer.decode, with_special=True)
        for prompt, trajectory in pairs[: self.config.run.log_samples]:
            self.context.folder.log_sample(num_steps, prompt, trajectory, decode=decode)


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
    for group in groups:
        total = Mean(sum(group.rewards), float(len(group.rewards)))
        if len({group.prompt.domain for group in groups}) > 1:
            stats += Stats({f"reward/{group.prompt.domain}": total})
        stats += part_stats(group)
        if any(turn.info for trajectory in group.trajectories for turn in trajectory.turns):
            stats += env_stats(group)
    return stats


def part_stats(group: Group) -> Stats:
    """The parts of its rewards, each by its name: the mean over the samples that have it."""
    stats = Stats()
    for trajectory in group.trajectories:
        stats += Stats({f"reward/{group.prompt.domain}/{name}": Mean(part) for name, part in trajectory.reward_parts.items()})
    return stats


def env_stats(group: Group) -> Stats:
    """What its environment measured: `success` at the end of each episode, actions and turns of each, the rest by turn."""
    prefix, stats = f"env/{group.prompt.domain}/", Stats()
    for trajectory in group.trajectories:
        last = trajectory.turns[-1].info
        told: dict[str, Mean] = {
            "success": Mean(last.get("success", 0.0)),
            "num_actions": Mean(sum(turn.info.get("num_actions", 1.0) for turn in trajectory.turns)),
            "turns": Mean(float(len(trajectory.turns))),
        }
        stats += Stats({prefix + name: metric for name, metric in told.items()})
        for turn in trajectory.turns:
            by_turn = {name: value for name, value in turn.info.items() if name not in told}
            stats += Stats({prefix + name: Mean(value) for name, value in by_turn.items()})
    return stats
