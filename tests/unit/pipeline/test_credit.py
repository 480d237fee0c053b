"""From groups of trajectories to the advantage of every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reroll.algo.shaping import RunningMoments
from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.pipeline.credit import advantage_stats, assign_advantages, critic_targets, on_domain_scale, policy_loss_of
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.training.base import Weighting
from reroll.training.loss import PolicyLoss, ValueLoss
from reroll.types import Completion, FinishReason, Group, Prompt, Status, Trajectory, Turn


def config(**fields: Any) -> RlvrConfig:
    tree = {
        "pipeline": "rlvr",
        "policy": {"model": "some/model"},
        "data": {"train": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"max_tokens": 64},
    }
    parsed = parse_config(tree | fields)
    assert isinstance(parsed, RlvrConfig)
    return parsed


def trajectory(reward: float, lengths: tuple[int, ...] = (2,), *, status: Status = Status.COMPLETED) -> Trajectory:
    """One turn for each length, each prompt extending the tokens before it by one."""
    ids: tuple[int, ...] = (1, 2)
    turns = []
    for length in lengths:
        written = tuple(range(10, 10 + length))
        completion = Completion(
            token_ids=written, logprobs=(-1.0,) * length, finish_reason=FinishReason.STOP, versions=((0, length),)
        )
        turns.append(Turn(prompt_ids=ids, completion=completion, text=""))
        ids = (*ids, *written, 3)
    return Trajectory(id="t", turns=tuple(turns), status=status, reward=reward)


def group(*trajectories: Trajectory, domain: str = "default") -> Group:
    return Group(
        number=0, prompt=Prompt(id="p", messages=(), domain=domain), trajectories=trajectories, version=0, baseline=None
    )


def assigned(groups: list[Group], teacher_advantage: float = 0.0, **fields: Any) -> Batch:
    samples, episodes = rows_of(groups)
    batch = pack(samples)
    return assign_advantages(batch, episodes, groups, config(**fields), teacher_advantage=batch.loss_mask * teacher_advantage)


TWO = [group(trajectory(1.0), trajectory(0.0)), group(trajectory(1.0, (1, 3)), trajectory(1.0, status=Status.TRUNCATED))]
"""Rows of 4, 4, 7 and 4 tokens; two rewards that differ, then two that do not."""


def test_each_token_gets_the_advantage_of_its_trajectory_and_prompts_get_none() -> None:
    batch = assigned(TWO, algorithm="dr_grpo")
    assert batch.advantage.tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5, -0.5, *[0] * 11]
    assert int(batch.loss_mask.sum()) == 10


@pytest.mark.parametrize(
    ("masks", "left"),
    [
        ({}, [2, 2, 4, 2]),
        ({"overlong": True}, [2, 2, 4, 0]),
        ({"zero_advantage": True}, [2, 2, 0, 0]),
        ({"last_turn": True}, [2, 2, 3, 2]),
        ({"keep_pass_rate": (0.1, 0.9)}, [2, 2, 0, 0]),
        ({"keep_pass_rate": (0.6, 1.0), "overlong": True}, [0, 0, 4, 0]),
    ],
)
def test_masks_take_tokens_out_of_the_loss_and_its_denominators(masks: dict[str, Any], left: list[int]) -> None:
    batch = assigned(TWO, masks=masks)
    assert [int(batch.select([row]).loss_mask.sum()) for row in range(4)] == left
    trained = batch.without_untrained()
    assert (trained.num_loss_tokens, trained.num_sequences) == (sum(left), sum(count > 0 for count in left))
    assert len(trained) == trained.num_sequences


def test_rewards_that_no_advantage_can_be_made_of_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"from 0 to inf.*shaping\.rewards\.clip"):
        assigned([group(trajectory(1e39), trajectory(0.0))])


@pytest.mark.parametrize(("masks", "left"), [({}, [2, 2, 4, 0]), ({"zero_advantage": True}, [1, 0, 1, 0])])
def test_only_the_least_sure_of_the_trained_tokens_keep_their_advantage(masks: dict[str, Any], left: list[int]) -> None:
    """A fifth of eight: those at and above the 5.6th from below."""
    samples, episodes = rows_of(TWO)
    batch = pack(samples)
    entropy = torch.zeros(batch.num_tokens)
    entropy[batch.loss_mask] = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.7, 0.8, 0.1, 0.2, 9.0, 9.0])  # The last row is overlong.
    settings = config(algorithm="reinforce", advantage={"kind": "raft"}, masks={"top_entropy": 0.2, "overlong": True} | masks)
    episodes = replace(episodes, entropy=entropy)
    assigned = assign_advantages(batch, episodes, TWO, settings, teacher_advantage=torch.zeros(batch.num_tokens))
    kept = assigned.advantage.nonzero().flatten()
    assert entropy[kept].tolist() == pytest.approx([0.9, 0.8])
    num_kept = [int(assigned.select([row]).loss_mask.sum()) for row in range(4)]
    assert num_kept == left


def test_a_masked_sample_still_counts_in_its_groups_baseline() -> None:
    groups = [group(trajectory(1.0), trajectory(0.0, status=Status.TRUNCATED))]
    assert assigned(groups, algorithm="dr_grpo", masks={"overlong": True}).advantage.tolist()[:4] == [0, 0, 0.5, 0.5]


def test_what_teachers_say_adds_to_the_rewards_or_stands_alone() -> None:
    teachers = {"one": {"model": "some/teacher"}}
    added = assigned(TWO, teacher_advantage=0.25, algorithm="dr_grpo", teachers=teachers)
    assert added.advantage[:4].tolist() == [0, 0, 0.75, 0.75]
    alone = assigned(TWO, teacher_advantage=0.25, teachers=teachers, distill_only=True)
    assert alone.advantage[alone.loss_mask].tolist() == [0.25] * 10


def test_advantages_are_shaped_after_the_estimator() -> None:
    batch = assigned(TWO, algorithm="dr_grpo", shaping={"advantages": {"clip": 0.1}})
    assert batch.advantage[batch.loss_mask].tolist() == pytest.approx([0.1, 0.1, -0.1, -0.1, *[0] * 6])


def test_an_estimator_of_your_own_is_found_by_its_path() -> None:
    batch = assigned(TWO, advantage={"kind": "import", "path": "reroll_zoo.algorithms.advantages:opo", "options": {}})
    assert torch.equal(batch.advantage, assigned(TWO, advantage={"kind": "opo"}).advantage)


def test_the_critics_targets_follow_their_own_trace_if_one_is_given() -> None:
    _, episodes = rows_of(TWO[:1])
    episodes.__dict__["value"] = torch.full((8,), 0.5)
    gae = config(algorithm="ppo", critic={"kind": "shared"}, advantage={"kind": "gae", "gae_lambda": 0.0})
    assert isinstance(gae, RlvrConfig)
    follow = critic_targets(episodes, gae.advantage, gae.value_loss)  # type: ignore[arg-type]
    returns = critic_targets(episodes, gae.advantage, gae.value_loss.model_copy(update={"gae_lambda": 1.0}))  # type: ignore[arg-type]
    assert follow.tolist() == pytest.approx([0, 0, 0.5, 1, 0, 0, 0.5, 0])
    assert returns.tolist() == pytest.approx([0, 0, 1, 1, 0, 0, 0, 0])


def test_the_loss_is_built_from_the_config() -> None:
    built = policy_loss_of(
        config(
            algorithm="clip_cov",
            aggregation="fixed_length",
            kl={"coef": 0.5, "estimator": "k2", "times_ratio": True},
            entropy_coef=0.01,
            corrections=[{"level": "turn", "mode": "mask"}],
            rejections=[{"high": 0.5}],
        ),
        kl_coef=0.25,
    )
    assert built == PolicyLoss(
        kind="clip_cov",
        options={"clip_low": 0.2, "clip_high": 0.2},
        selection={"share": 2e-4, "low": 1.0, "high": 5.0},
        selects="reroll_zoo.algorithms.selections:between",
        aggregation="fixed_length",
        length=64,
        kl_coef=0.25,
        kl_estimator="k2",
        kl_times_ratio=True,
        entropy_coef=0.01,
        corrections=(Weighting(kind="importance", options={"level": "turn", "mode": "mask", "low": 0.5, "high": 2.0}),),
        rejections=(
            Weighting(
                kind="distance",
                options={"distance": "k3", "level": "sequence", "take": "mean", "high": 0.5, "only_negative": False},
            ),
        ),
    )


def test_a_loss_of_ones_own_that_needs_entropy_is_given_it() -> None:
    mine = {"kind": "import", "path": "reroll.algo.losses:reinforce"}
    assert policy_loss_of(config(loss=mine | {"needs": ["entropy"]}), kl_coef=0).needs.entropy
    assert not policy_loss_of(config(loss=mine), kl_coef=0).needs.entropy


def test_a_penalty_in_the_reward_is_no_term_of_the_loss() -> None:
    assert policy_loss_of(config(kl={"coef": 0.5, "apply_to": "reward"}), kl_coef=0.5).kl_coef == 0


def test_a_critic_on_the_policys_trunk_joins_the_loss() -> None:
    built = policy_loss_of(config(algorithm="ppo", critic={"kind": "shared", "coef": 0.1}), kl_coef=0)
    assert (built.value, built.value_coef) == (ValueLoss(clip=0.2), 0.1)


def test_the_report_on_advantages_counts_tokens_in_the_loss_only() -> None:
    batch = assigned(TWO[:1], algorithm="dr_grpo")
    values = advantage_stats(batch.advantage[batch.loss_mask]).values_by_name()
    assert values == pytest.approx({"advantage/mean": 0, "advantage/std": 0.5, "advantage/max": 0.5})


def test_domains_of_different_scale_count_alike_over_all_steps_so_far() -> None:
    moments: dict[str, RunningMoments] = {}
    first = [group(trajectory(1.0), trajectory(0.0), domain="sums"), group(trajectory(100.0), trajectory(0.0), domain="games")]
    scaled = on_domain_scale(rows_of(first).episodes, first, moments)
    assert scaled.reward.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2, rel=1e-5)
    second = [group(trajectory(50.0), trajectory(50.0), domain="games")]
    again = on_domain_scale(rows_of(second).episodes, second, moments)
    assert again.reward.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert (moments["games"].count, moments["sums"].count) == (4, 2)
