"""From what a step's samples earned to the advantage of every token, and the loss that uses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reroll.algo.advantages import gae_returns
from reroll.algo.episodes import Episodes
from reroll.algo.kl import k3
from reroll.algo.selection import highest_entropy
from reroll.algo.shaping import RunningMoments, shape_advantages, standardised
from reroll.config.advantages import AdvantageConfig, GaeAdvantageConfig
from reroll.config.algorithm import MaskConfig, SharedCriticConfig, ValueLossConfig
from reroll.config.formula import find_function
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Last, Stats
from reroll.tokens.batch import Batch
from reroll.training.base import Divergence, Weighting, required
from reroll.training.loss import PolicyLoss, ValueLoss
from reroll.types import Group, Status


def assign_advantages(
    batch: Batch, episodes: Episodes, groups: Sequence[Group], config: RlvrConfig, *, teacher_advantage: Tensor
) -> Batch:
    """The batch with an advantage on every token, less the tokens that the masks leave out of the loss.

    `teacher_advantage` [T] is added to what the rewards say, or stands alone where the config says so.
    """
    advantage = teacher_advantage if config.distill_only else estimate(episodes, config) + teacher_advantage
    kept = batch.loss_mask & _kept(episodes, groups, config.masks)
    if config.masks.top_entropy is not None:
        advantage = torch.where(
            highest_entropy(required(episodes.entropy), kept, share=config.masks.top_entropy), advantage, 0.0
        )
    advantage = torch.where(batch.loss_mask, advantage, 0.0)
    return batch.replace(advantage=advantage, loss_mask=kept & (advantage != 0) if config.masks.zero_advantage else kept)


def on_domain_scale(episodes: Episodes, groups: Sequence[Group], moments: dict[str, RunningMoments]) -> Episodes:
    """The episodes with each domain's rewards as deviations from its mean. This step's rewards are counted into `moments`."""
    for group in groups:
        moments.setdefault(group.prompt.domain, RunningMoments()).update(group.rewards)
    by_group = [moments[group.prompt.domain] for group in groups]
    mean, std = torch.tensor([one.mean for one in by_group]), torch.tensor([one.std for one in by_group])
    return standardised(episodes, mean=mean[episodes.group], std=std[episodes.group])


def estimate(episodes: Episodes, config: RlvrConfig) -> Tensor:
    """[T]: what the estimator makes of the rewards, shaped."""
    function = find_function(AdvantageConfig.group, config.advantage.function_name)
    estimated = function(episodes, **config.advantage.arguments)
    advantage = shape_advantages(estimated, episodes, **config.shaping.advantages.model_dump())
    if not advantage.isfinite().all():
        low, high = (float(value) for value in episodes.reward.aminmax())
        raise ValueError(
            f"advantage {config.advantage.kind} made numbers that are not finite of rewards from {low:g} to {high:g}: "
            "mend the reward, or bound it with shaping.rewards.clip"
        )
    return advantage


def critic_targets(episodes: Episodes, config: GaeAdvantageConfig, value_loss: ValueLossConfig) -> Tensor:
    """[T] the returns that the critic is trained towards."""
    gae_lambda = config.gae_lambda if value_loss.gae_lambda is None else value_loss.gae_lambda
    return gae_returns(episodes, discount=config.discount, gae_lambda=gae_lambda)


def _kept(episodes: Episodes, groups: Sequence[Group], masks: MaskConfig) -> Tensor:
    """bool [T]: tokens that stay in the loss, whatever their advantage."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    per_episode = torch.ones(episodes.num_episodes, dtype=torch.bool)
    if masks.overlong:
        per_episode &= torch.tensor([trajectory.status is not Status.TRUNCATED for trajectory in trajectories])
    if masks.keep_pass_rate is not None:
        low, high = masks.keep_pass_rate
        means = torch.tensor([sum(group.rewards) / max(len(group.rewards), 1) for group in groups])
        per_episode &= ((means >= low) & (means <= high))[episodes.group]
    per_turn = per_episode[episodes.turn_episode]
    if masks.last_turn:
        per_turn = per_turn & episodes.is_last_turn
    return episodes.spread_turns(per_turn.float()) > 0


def policy_loss_of(config: RlvrConfig, *, kl_coef: float, vocabulary: int | None = None) -> PolicyLoss:
    """The loss that the config describes, with the KL coefficient of the moment. `vocabulary`: ids shared with teachers."""
    distill = config.distill and config.distill.divergence
    node, shared = config.loss, config.critic if isinstance(config.critic, SharedCriticConfig) else None
    return PolicyLoss(
        kind=node.function_name,
        options=node.arguments,
        selection=node.selection,
        selects=node.selects,
        sees_entropy=node.sees_entropy,
        aggregation=config.aggregation,
        length=config.longest_answer,
        kl_coef=kl_coef if config.kl.apply_to == "loss" else 0.0,
        kl_estimator=config.kl.estimator,
        kl_times_ratio=config.kl.times_ratio,
        entropy_coef=config.entropy_coef,
        corrections=tuple(Weighting(kind=node.kind, options=node.arguments) for node in config.corrections),
        rejections=tuple(Weighting(kind=node.kind, options=node.arguments) for node in config.rejections),
        distill=Divergence(kind=distill.kind, options=distill.arguments) if distill else None,
        vocabulary=vocabulary if distill else None,
        value=ValueLoss(clip=config.value_loss.clip) if shared else None,
        value_coef=shared.coef if shared else 0.0,
        exact=config.policy.exact,
    )


def kl_to_reference(batch: Batch) -> float | None:
    """Estimated KL (k3) of the sampling policy to the reference, averaged over the loss tokens; None if either is missing."""
    if batch.ref_logp is None or not batch.loss_mask.any():
        return None
    return float(k3(batch.logp, batch.ref_logp)[batch.loss_mask].mean())


def advantage_stats(values: Tensor) -> Stats:
    """What the advantages of a step's tokens in the loss look like."""
    if not len(values):
        return Stats()
    return Stats(
        {
            "advantage/mean": Last(float(values.mean())),
            "advantage/std": Last(float(values.std(correction=0))),
            "advantage/max": Last(float(values.abs().max())),
        }
    )
