"""RL with verifiable rewards: sample groups, score them, update the policy, publish its weights."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, Self

import torch

from reroll.algo.episodes import Episodes
from reroll.algo.kl import KL_ESTIMATORS, adapted_coef
from reroll.algo.shaping import RunningMoments, shape_rewards
from reroll.config.advantages import GaeAdvantageConfig
from reroll.config.algorithm import OwnCriticConfig
from reroll.config.registry import load_entry
from reroll.config.tree import RlvrConfig
from reroll.errors import SamplerMismatch
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.pipeline.build import LearningModels, RlvrComponents, build_rlvr
from reroll.pipeline.credit import (
    advantage_stats,
    assign_advantages,
    critic_targets,
    kl_to_reference,
    on_domain_scale,
    policy_loss_of,
)
from reroll.pipeline.evaluate import num_episodes
from reroll.pipeline.guard import alarm_of
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.training.base import Needs, required
from reroll.training.loss import PolicyLoss, ValueLoss
from reroll.types import Group, Status

_WHOLE_VOCABULARY = 1 << 30
FLAT_STEPS = 3
"""After this many steps in a row without a gradient the user is told: a single one may be chance."""


class EarlyUpdate(Protocol):
    """An update that begins before all groups of its step are there, as `(learner, step)` makes it."""

    busy_s: float
    """Seconds of training until now."""

    async def add(self, groups: Sequence[Group]) -> None:
        """Take further groups of the step, and train on as many as there should be."""

    async def finish(self) -> Stats:
        """Complete the update: all groups are there."""


class GroupLearner(Pipeline[RlvrConfig]):
    """Turns groups of scored samples into an update: advantages, reference, critic, teachers, loss. Subclasses supply the
    groups."""

    config_class = RlvrConfig

    def __init__(self, config: RlvrConfig, context: RunContext, parts: LearningModels) -> None:
        super().__init__(config, context)
        self.parts = parts
        self.policy = parts.policy
        self.critic = parts.critic
        self.moments = RunningMoments()
        self.domain_moments: dict[str, RunningMoments] = {}
        self.kl_coef = config.kl.coef
        if parts.critic is not None and isinstance(config.critic, OwnCriticConfig):
            self.side_models["critic"] = parts.critic
        if parts.reference is not None and config.reference.sync_every:
            self.side_models["reference"] = parts.reference

    async def train_on(self, groups: Sequence[Group], step: int) -> Stats:
        """Update the models on these groups."""
        samples, episodes = rows_of(groups)
        batch = self.with_temperature(pack(samples), episodes, groups)
        if self.config.shaping.domains == "normalised":
            episodes = on_domain_scale(episodes, groups, self.domain_moments)
        with self.context.view.doing(lambda: f"training on {len(samples)} rows"):
            return await self.learn(batch, episodes, groups, step)

    async def learn(self, batch: Batch, episodes: Episodes, groups: Sequence[Group], step: int) -> Stats:
        """Give every token its advantage, and update the models."""
        async with self.parts.devices.lease("policy"):
            batch, episodes = await self.add_reference_and_values(batch, episodes)
            batch = await self.credit(batch, episodes, groups)
            kl = kl_to_reference(batch)
            # Reports the coefficient behind this step's rewards.
            stats = advantage_stats(batch.advantage[batch.loss_mask]) + self.kl_stats(kl)
            self.update_kl_coef(kl, num_samples=len(batch))  # The loss uses the new one.
            stats += await self.update(batch.without_untrained(), step)
            await self.check_sampler(stats, batch, episodes, groups, step)
            await self.sync_reference(num_steps=step + 1)
            return stats

    async def sync_reference(self, *, num_steps: int) -> None:
        """Move the reference towards the policy, if that is due after `num_steps` steps."""
        config, reference = self.config.reference, self.parts.reference
        if reference is not None and config.sync_every and num_steps % config.sync_every == 0:
            await reference.follow(self.policy, share=config.mix)

    async def check_sampler(self, stats: Stats, batch: Batch, episodes: Episodes, groups: Sequence[Group], step: int) -> None:
        """Hook: compare the engine's log-probs of the samples with the policy's. A subclass that draws the samples itself knows
        how far apart they may be."""

    def with_temperature(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> Batch:
        """The batch with its sampling temperature: one number, or one per token if domains differ."""
        by_group = [self.config.rollout.of(group.prompt.domain).temperature for group in groups]
        if len(set(by_group)) == 1:
            return batch.replace(temperature=by_group[0])
        by_episode = torch.tensor(by_group)[episodes.group]
        return batch.replace(temperature=torch.where(batch.loss_mask, episodes.spread(by_episode), 1.0))

    async def add_reference_and_values(self, batch: Batch, episodes: Episodes) -> tuple[Batch, Episodes]:
        """Add the reference's log-probs, the critic's values and the policy's outputs where the algorithm needs them, and shape
        the rewards."""
        config, kl = self.config, self.config.kl
        if config.ratio_to_sampler:
            batch = batch.replace(old_logp=batch.logp)  # The ratio compares with the policy that drew the samples.
        if self.parts.reference:
            top_k = (kl.top_k or _WHOLE_VOCABULARY) if kl.estimator == "full" else 0
            predictions = await self.parts.reference.predict(batch, Needs(top_k=top_k, adapter=False))
            batch = batch.replace(ref_logp=predictions.logp, target_ids=predictions.top_ids, target_logp=predictions.top_logp)
            if kl.apply_to == "reward":
                episodes = episodes.penalised(
                    self.kl_coef * KL_ESTIMATORS[kl.estimator](batch.logp, required(predictions.logp))
                )
        episodes = shape_rewards(episodes, **config.shaping.rewards.model_dump())
        if self.critic and isinstance(config.advantage, GaeAdvantageConfig):
            episodes = replace(episodes, value=await self.critic.values(batch))
            batch = batch.replace(value=episodes.value, returns=critic_targets(episodes, config.advantage, config.value_loss))
        batch, episodes = await self._add_policy_outputs(batch, episodes)
        self.moments.update(episodes.reward)
        return batch, replace(episodes, running_mean=self.moments.mean, running_std=self.moments.std)

    async def _add_policy_outputs(self, batch: Batch, episodes: Episodes) -> tuple[Batch, Episodes]:
        """Add the policy's outputs from before the update where the algorithm needs them, in one pass."""
        config, train = self.config, self.config.train
        score_norm = config.advantage.reads_score_norm
        entropy = config.masks.top_entropy is not None
        if not (score_norm or entropy):
            return batch, episodes
        # Several optimizer steps need the log-probs from before the first: this pass gives them too.
        logp = batch.old_logp is None and train.epochs * train.mini_batches > 1
        predictions = await self.policy.predict(batch, Needs(logp=logp, score_norm=score_norm, entropy=entropy))
        if logp:
            batch = batch.replace(old_logp=predictions.logp)
        return batch, replace(episodes, score_norm=predictions.score_norm, entropy=predictions.entropy)

    async def credit(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> Batch:
        """The batch with every token's advantage. Teachers add to it, or give the target distributions of a loss term."""
        config, teachers = self.config, self.parts.teachers
        teacher_advantage = torch.zeros_like(batch.advantage)
        if config.teachers and config.distill is None:
            teacher_advantage = await teachers.advantage(batch, episodes, groups)
        batch = assign_advantages(batch, episodes, groups, config, teacher_advantage=teacher_advantage)
        if config.distill is None:
            return batch
        return await teachers.with_distributions(batch, episodes, groups, config.distill)

    async def update(self, batch: Batch, step: int) -> Stats:
        """Train the critic, if it is a model of its own, then the policy."""
        config, train, stats = self.config, self.config.train, Stats()
        if not batch.loss_mask.any():
            return stats  # Every token is masked: momentum alone must not move the policy.
        if isinstance(config.critic, OwnCriticConfig) and self.critic:
            value_loss = ValueLoss(clip=config.value_loss.clip)
            critic_stats = await self.critic.train(
                batch, value_loss, epochs=train.epochs, mini_batches=train.mini_batches, seed=step
            )
            stats += Stats({name.replace("train", "critic", 1): metric for name, metric in critic_stats.items()})
            if step < config.critic.warmup_steps:
                return stats
        loss, epochs, mini_batches = self.loss_of(step), train.epochs, train.mini_batches
        return stats + await self.policy.train(batch, loss, epochs=epochs, mini_batches=mini_batches, seed=step)

    def loss_of(self, step: int) -> PolicyLoss:
        """The loss of this step's update of the policy."""
        loss = policy_loss_of(self.config, kl_coef=self.kl_coef, vocabulary=self.parts.teachers.vocabulary)
        return replace(loss, version=step)

    def kl_stats(self, kl: float | None) -> Stats:
        """Metrics: the KL coefficient, and the KL to the reference if it was measured."""
        if self.parts.reference is None:
            return Stats()
        stats = Stats({"kl/coef": Last(self.kl_coef)})
        if kl is not None:
            stats.add("kl/reference", Last(kl))
        return stats

    def update_kl_coef(self, kl: float | None, *, num_samples: int) -> None:
        """Adapt the coefficient to the measured KL, if it is adaptive. A step without a measurement leaves it unchanged."""
        adaptive = self.config.kl.adaptive
        if adaptive and kl is not None:
            self.kl_coef = adapted_coef(
                self.kl_coef, kl, target=adaptive.target, horizon=adaptive.horizon, num_samples=num_samples
            )

    def _restored_coef(self, saved: float | None) -> float:
        """The saved value of an adaptive coefficient; a fixed one comes from the config."""
        coef = self.config.kl.coef
        if self.config.kl.adaptive is None:
            return coef
        if saved is None or not math.isfinite(saved):  # NaN is null in the checkpoint's JSON.
            self.context.view.note(f"the checkpoint's KL coefficient is no number: it starts again from kl.coef, {coef:g}")
            return coef
        return saved

    def learner_state(self) -> dict[str, Any]:
        """The algorithm's state between steps, for a checkpoint."""
        domains = {domain: moments.state() for domain, moments in self.domain_moments.items()}
        return {"kl_coef": self.kl_coef, "moments": self.moments.state(), "domain_moments": domains}

    def restore_learner(self, state: Mapping[str, Any]) -> None:
        """Restore a `learner_state`. Entries that an older checkpoint lacks keep their initial values."""
        state = {**self.learner_state(), **state}
        self.kl_coef = self._restored_coef(state["kl_coef"])
        self.moments.restore(state["moments"])
        for domain, moments in state["domain_moments"].items():
            self.domain_moments.setdefault(domain, RunningMoments()).restore(moments)


class RlvrPipeline(GroupLearner):
    """One loop for synchronous and asynchronous training: the staleness budget is the only difference."""

    title = "reinforcement learning"
    parts: RlvrComponents

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RlvrConfig, context: RunContext) -> AsyncIterator[Self]:
        attempt = context.restarts.num + 1
        folder, code_folder = context.folder.path, context.code_folder
        async with build_rlvr(config, folder=folder, code_folder=code_folder, rows=context.rows, attempt=attempt) as parts:
            yield cls(parts.config, context, parts)

    def __init__(self, config: RlvrConfig, context: RunContext, parts: RlvrComponents) -> None:
        super().__init__(config, context, parts)
        self.rollouts = parts.rollouts
        shares_gpu = parts.devices.overlap("policy", "engine")
        streams = config.train.stream and not shares_gpu
        self._begin_update: Callable[..., EarlyUpdate] | None = load_entry("reroll.updates", "streamed") if streams else None
        if config.train.stream and shares_gpu:
            context.notes.append("train.stream has no effect: policy and engine take turns on the same GPU")
        self._num_flat_steps = 0
        self._committed_state = self._state_now()
        """The result of `state`, as of the last finished step: prompts of an unfinished step count as unused."""

    async def step(self, step: int) -> Stats:
        started = time.perf_counter()
        view = self.context.view
        with view.doing(self.rollouts.progress):
            update = self._begin_update(self, step) if self._begin_update else None
            groups = await self.context.unless_stopped(self._take(update))
        waited_s = time.perf_counter() - started - (update.busy_s if update else 0.0)
        waited = Stats({"time/wait_s": Last(waited_s)})
        trained = await (update.finish() if update else self.train_on(groups, step))
        with view.doing(lambda: "pushing weights"):
            async with self.parts.devices.lease("engine"):
                pushed = await self.parts.weights.push(version=step + 1)
        self.warn_without_signal(groups, trained)
        self.rollouts.release(groups, version=step + 1)  # Slots free only now, or new samples would be stale from the start.
        self._committed_state = self._state_now()
        swapped = Stats({"time/swap_s": Last(self.parts.devices.take_swap_s())})
        return waited + swapped + trained + pushed + rollout_stats(groups) + self._component_stats()

    async def _take(self, update: EarlyUpdate | None) -> list[Group]:
        """The groups of a step, and with `update` their gradients as they come."""
        num_prompts = self.config.rollout.prompts_per_step
        if update is None:
            return await self.rollouts.take(num_prompts)
        groups: list[Group] = []
        async with aclosing(self.rollouts.take_parts(num_prompts)) as parts:
            async for part in parts:
                groups += part
                await update.add(part)
        return groups

    async def check_sampler(self, stats: Stats, batch: Batch, episodes: Episodes, groups: Sequence[Group], step: int) -> None:
        """Raise SamplerMismatch if the engine's log-probs differ from the policy's by more than precision explains. A diagnosis
        plug-in, if installed, examines the batch to say where."""
        alarm = alarm_of(stats, self.config)
        if alarm is None:
            return
        diagnose = load_entry("reroll.diagnosis", "sampler")
        found = await diagnose(self, alarm, batch, episodes, groups, version=step) if diagnose else ""
        raise SamplerMismatch(alarm.text(found, version=step))

    def warn_without_signal(self, groups: Sequence[Group], trained: Stats) -> None:
        """Tell the user, once per occurrence, when several steps in a row gave no gradient."""
        gradient = trained.values_by_name().get("train/grad_norm")
        is_flat = gradient == 0 and not any(group.has_signal for group in groups)
        self._num_flat_steps = self._num_flat_steps + 1 if is_flat else 0
        if self._num_flat_steps == FLAT_STEPS:
            reward = groups[0].rewards[0]
            same = f" ({reward:g} throughout)" if {*groups[0].rewards} == {r for group in groups for r in group.rewards} else ""
            self.context.view.note(
                f"nothing is learned: for {FLAT_STEPS} steps the rewards in each group were equal{same} and the gradient 0. "
                f"See what is written and earned with `reroll show {self.context.folder.path}`; then change the task or the "
                "reward, raise rollout.group_size, or set rollout.drop_zero_variance_groups=true to pass over such prompts"
            )

    def _component_stats(self) -> Stats:
        """Metrics of scheduler, engines, rewards and environments since the last step."""
        runner = self.parts.episode_runner
        stats = self.rollouts.stats() + runner.engine.stats() + runner.rewards.stats()
        return stats + runner.envs.stats() if self.config.envs else stats

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
            playing = self.parts.episode_runner.evaluate(prompts, settings, seed=self.config.run.seed, on_done=advance)
            return (await self.context.unless_stopped(playing)).stats()

    @property
    def eval_every(self) -> int:
        return self.config.eval.every

    def state(self) -> dict[str, Any]:
        return self._committed_state

    def _state_now(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts.state(), **self.learner_state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rollouts.restore(state["rollouts"])
        self.restore_learner(state)
        self._committed_state = self._state_now()

    def restart(self) -> None:
        self.rollouts.take_up(version=0)


def rollout_stats(groups: Sequence[Group]) -> Stats:
    """Metrics of a step's samples: rewards, lengths, truncation, groups with signal."""
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
    num_domains = len({group.prompt.domain for group in groups})
    for group in groups:
        if num_domains > 1:
            stats.add(f"reward/{group.prompt.domain}", Mean(sum(group.rewards), float(len(group.rewards))))
        stats += part_stats(group)
        if any(turn.info for trajectory in group.trajectories for turn in trajectory.turns):
            stats += env_stats(group)
    return stats


def part_stats(group: Group) -> Stats:
    """The mean of each reward part and further measurement, by name, over the samples that have it."""
    parts = defaultdict(list)
    for trajectory in group.trajectories:
        for name, part in trajectory.score.named.items():
            parts[name].append(part)
    return _means(f"reward/{group.prompt.domain}/", parts)


def env_stats(group: Group) -> Stats:
    """Metrics of its environment: `success` at the end of each episode, actions and turns per episode, the rest per turn."""
    by_episode, by_turn = defaultdict(list), defaultdict(list)
    for trajectory in group.trajectories:
        by_episode["success"].append(trajectory.turns[-1].info.get("success", 0.0))
        by_episode["num_actions"].append(sum(turn.info.get("num_actions", 1.0) for turn in trajectory.turns))
        by_episode["turns"].append(float(len(trajectory.turns)))
        for turn in trajectory.turns:
            for name, value in turn.info.items():
                by_turn[name].append(value)
    return _means(f"env/{group.prompt.domain}/", by_turn | by_episode)


def _means(prefix: str, values: Mapping[str, Sequence[float]]) -> Stats:
    return Stats({prefix + name: Mean(sum(seen), float(len(seen))) for name, seen in values.items()})
