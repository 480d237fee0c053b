"""Combinations of an algorithm's parts that would do nothing, or not what they say, are refused with their fix."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError

PARTS = {"kind": "stack", "parts": {"right": {"kind": "exact"}, "close": {"kind": "numeric"}}}
"""gdpo asks for parts; the others do not mind."""


def tree(**fields: Any) -> dict[str, Any]:
    rollout = {"group_size": 8, "max_tokens": 64} | fields.pop("rollout", {})
    return {
        "pipeline": "rlvr",
        "policy": {"model": "some/model"},
        "data": {"train": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
        "rewards": {"default": PARTS},
        "rollout": rollout,
        **fields,
    }


def config(**fields: Any) -> RlvrConfig:
    parsed = parse_config(tree(**fields))
    assert isinstance(parsed, RlvrConfig)
    return parsed


def problems(**fields: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(**fields))
    assert all(violation.fix for violation in caught.value.violations)
    return {violation.path: f"{violation.problem} ({violation.fix})" for violation in caught.value.violations}


IN_REWARD = {"coef": 0.1, "estimator": "k1", "apply_to": "reward"}


@pytest.mark.parametrize("algorithm", ["gdpo", "pass_at_k", "raft", "raft++"])
def test_a_kl_penalty_in_a_reward_that_the_estimator_does_not_look_at_is_refused(algorithm: str) -> None:
    assert "nothing would notice" in problems(algorithm=algorithm, kl=IN_REWARD)["kl.apply_to"]
    assert config(algorithm=algorithm, kl={"coef": 0.1})


def test_an_estimator_that_looks_at_the_penalised_reward_may_have_one() -> None:
    for algorithm in ("grpo", "rloo", "reinforce++", "gigpo", "otb"):
        assert config(algorithm=algorithm, kl=IN_REWARD)
    assert config(algorithm="raft", advantage={"accept": "best"}, kl=IN_REWARD)


@pytest.mark.parametrize("algorithm", ["gdpo", "pass_at_k", "raft", "raft++"])
@pytest.mark.parametrize("shaping", [{"clip": 1.0}, {"length": {}}])
def test_shaping_a_reward_that_the_estimator_does_not_look_at_is_refused(algorithm: str, shaping: dict[str, Any]) -> None:
    found = problems(algorithm=algorithm, shaping={"rewards": shaping})
    assert "has no effect" in found[f"shaping.rewards.{next(iter(shaping))}"]


def test_normalising_domains_says_nothing_to_the_parts_that_gdpo_looks_at() -> None:
    assert "parts of the reward" in problems(algorithm="gdpo", shaping={"domains": "normalised"})["shaping.domains"]
    assert config(algorithm="raft", shaping={"domains": "normalised"})  # Its threshold is then one of deviations.


def test_what_is_done_to_rewards_is_refused_where_only_teachers_are_heard() -> None:
    alone = {"algorithm": "opd", "teachers": {"big": {"model": "some/teacher"}}}
    found = problems(**alone, kl=IN_REWARD, shaping={"rewards": {"clip": 1.0}, "advantages": {"whiten": True}})
    assert {"kl.apply_to", "shaping.rewards.clip", "shaping.advantages.whiten"} <= found.keys()
    assert config(**alone)


def test_a_length_weight_that_the_greedy_answer_would_not_get_is_refused() -> None:
    assert "greedy" in problems(algorithm="remax", shaping={"rewards": {"length": {}}})["shaping.rewards.length"]
    assert config(algorithm="remax", shaping={"rewards": {"clip": 1.0}})


def test_k1_is_refused_as_a_term_of_the_loss_unless_it_is_weighed_by_the_ratio() -> None:
    assert "zero on average" in problems(kl={"coef": 0.1, "estimator": "k1"})["kl.estimator"]
    assert config(kl={"coef": 0.1, "estimator": "k1", "times_ratio": True})
    assert config(kl=IN_REWARD)


@pytest.mark.parametrize("kl", [IN_REWARD, {"coef": 0.1, "estimator": "full"}])
def test_a_kl_that_no_ratio_can_weigh_is_refused_one(kl: dict[str, Any]) -> None:
    assert "has no effect" in problems(kl=kl | {"times_ratio": True})["kl.times_ratio"]


WITHOUT_RATIO = ["rloo", "reinforce", "opo", "gpg", "remax", "otb", "raft"]


@pytest.mark.parametrize("algorithm", WITHOUT_RATIO)
def test_a_loss_without_a_ratio_is_refused_stale_samples_until_they_are_corrected(algorithm: str) -> None:
    stale = {"algorithm": algorithm, "rollout": {"max_staleness": 2}}
    assert "older policy is biased" in problems(**stale)["loss.kind"]
    corrected = config(**stale, corrections=[{"level": "token", "mode": "truncate"}])
    assert not corrected.ratio_to_sampler  # So that the weight is the trainer's to the sampler's, and not 1.


def test_a_correction_from_the_sampler_to_itself_is_refused() -> None:
    corrections: dict[str, Any] = {"corrections": [{}]}
    assert "against the sampler already" in problems(**corrections, rollout={"max_staleness": 1})["corrections"]
    reinforce = problems(**corrections, algorithm="reinforce", old_policy="sampler")
    assert "weigh old_policy against the sampler" in reinforce["corrections"]
    rejections = config(rejections=[{"high": 0.1}], old_policy="sampler", rollout={"max_staleness": 1})
    assert rejections.ratio_to_sampler


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("path", "nested"),
    [
        ("entropy_coef", lambda value: {"entropy_coef": value}),
        ("kl.coef", lambda value: {"kl": {"coef": value}}),
        ("advantage.epsilon", lambda value: {"advantage": {"epsilon": value}}),
        ("advantage.weights.right", lambda value: {"algorithm": "gdpo", "advantage": {"weights": {"right": value}}}),
        ("policy.optim.lr", lambda value: {"policy": {"model": "some/model", "optim": {"lr": value}}}),
        ("shaping.rewards.clip", lambda value: {"shaping": {"rewards": {"clip": value}}}),
    ],
)
def test_a_number_of_the_config_is_finite(path: str, nested: Any, value: float) -> None:
    assert "finite number" in problems(**nested(value))[path]


def test_a_bound_may_be_left_off_but_is_a_number() -> None:
    assert config(loss={"clip_low": 1.0, "clip_high": math.inf}).loss.clip_high == math.inf  # type: ignore[union-attr]
    assert config(corrections=[{"high": math.inf}]).corrections[0].high == math.inf
    assert config(value_loss={"clip": math.inf}).value_loss.clip == math.inf
    assert problems(loss={"clip_high": math.nan}).keys() == {"loss.clip_high"}


def test_the_longest_answer_is_that_of_any_domain_and_of_all_its_turns() -> None:
    sums = {"kind": "reasoning_gym", "name": "chain_sum", "domain": "sums"}
    proofs = sums | {"domain": "proofs"}
    two = config(data={"train": [sums, proofs]}, rollout={"domains": {"proofs": {"max_tokens": 200}}})
    assert two.longest_answer == 200
    lake = {"env": {"kind": "frozen_lake"}, "max_turns": 5}
    played = {"pipeline": "agentic", "data": {"train": [{"kind": "env", "domain": "lake"}]}, "rewards": {}}
    assert config(**played, envs={"lake": lake}).longest_answer == 5 * 64
    assert config(**played, envs={"lake": lake}, rollout={"max_total_tokens": 256}).longest_answer == 256


TEACHER = {"big": {"model": "some/teacher"}}


def test_a_distribution_to_follow_needs_a_teacher() -> None:
    assert "needs one to follow" in problems(distill={})["teachers"]
    assert "learns from nothing else" in problems(algorithm="gkd")["teachers"]


def test_two_distributions_for_one_token_are_refused() -> None:
    two = TEACHER | {"other": {"model": "some/other"}}
    assert "both teach default" in problems(distill={}, teachers=two)["teachers.other.domains"]
    assert "kl.estimator" in problems(distill={}, teachers=TEACHER, kl={"coef": 0.1, "estimator": "full"})
    assert config(teachers=two)  # Of log-probs there may be several: they add up.


def test_what_works_on_advantages_is_refused_where_none_are_learned_from() -> None:
    alone = {"algorithm": "gkd", "teachers": TEACHER}
    found = problems(**alone, corrections=[{}], rejections=[{"high": 1.0}], masks={"top_entropy": 0.2, "zero_advantage": True})
    assert {"corrections", "rejections", "masks.top_entropy", "masks.zero_advantage"} <= found.keys()
    assert config(**alone)


def test_following_a_distribution_is_not_biased_by_stale_samples_or_several_steps() -> None:
    alone = {"algorithm": "gkd", "teachers": TEACHER}
    assert config(**alone, rollout={"max_staleness": 2}, train={"mini_batches": 2})
    assert "loss.kind" in problems(algorithm="opd", teachers=TEACHER, train={"mini_batches": 2})


def test_a_reference_follows_under_torch_and_fsdp2_and_not_under_deepspeed() -> None:
    def fields(kind: str) -> dict[str, Any]:
        policy = {"model": "some/model", "strategy": {"kind": kind}, "devices": "cpu"}
        runtime = {"kind": "local" if kind == "torch" else "ray"}
        return {"policy": policy, "runtime": runtime, "kl": {"coef": 0.1}, "reference": {"sync_every": 2}}

    for kind in ("torch", "fsdp2"):
        assert config(**fields(kind))
    assert "use strategy torch or fsdp2" in problems(**fields("deepspeed"))["reference.sync_every"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"train": {"mini_batches": 2}}, "several optimizer steps"),
        ({"algorithm": "reinforce++_baseline"}, "samples of other groups"),
        ({"algorithm": "gdpo"}, "samples of other groups"),
        ({"algorithm": "gpg"}, "samples of other groups"),
        ({"shaping": {"advantages": {"whiten": True}}}, "advantages of all samples"),
        ({"shaping": {"domains": "normalised"}}, "rewards of all samples"),
        ({"masks": {"top_entropy": 0.2}}, "masks.top_entropy"),
        ({"algorithm": "clip_cov", "train": {"epochs": 1, "mini_batches": 1}}, "loss clip_cov"),
        ({"kl": {"coef": 0.1, "adaptive": {"target": 0.1}}}, "kl.adaptive"),
        ({"algorithm": "ppo", "shaping": {"advantages": {"whiten": False}}}, "critic {kind: own}"),
        ({"advantage": {"kind": "import", "path": "statistics:mean"}}, "by_group: true"),
        ({"policy": {"model": "some/model", "strategy": {"kind": "deepspeed"}}}, "strategy deepspeed"),
    ],
)
def test_an_update_that_has_to_see_all_samples_first_is_not_streamed(fields: dict[str, Any], why: str) -> None:
    fields = {**fields, "train": {**fields.get("train", {}), "stream": True}}
    assert why in problems(**fields)["train.stream"]


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "remax", "opo", "pass_at_k", "raft", "otb", "gigpo"]
)
def test_what_a_group_alone_decides_is_streamed(algorithm: str) -> None:
    assert config(algorithm=algorithm, train={"stream": True}).train.stream
