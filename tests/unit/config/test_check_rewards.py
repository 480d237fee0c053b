"""What `reroll check` says about rewards."""

from __future__ import annotations

from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.errors import ConfigError


@pytest.fixture
def tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Of one domain, which no reward judges yet."""
    tree["data"]["train"][0]["domain"] = "sums"
    del tree["rewards"]
    return tree


def overlong(**fields: int) -> dict[str, Any]:
    return {"kind": "overlong", "max_tokens": 64, "buffer_tokens": 16, **fields}


@pytest.mark.parametrize(
    ("reward", "where", "says"),
    [
        (None, "data.train.0.domain", "'sums' has no reward (add rewards.sums, or rewards.default)"),
        ({"kind": "stack", "parts": {}}, "rewards.sums.parts", "is empty (name at least one reward"),
        ({"kind": "stack"}, "rewards.sums.parts", "is missing"),
        ({"kind": "stack", "parts": {"a.b": {"kind": "exact"}}}, "rewards.sums.parts", "'a.b' cannot name a part"),
        (
            {"kind": "stack", "parts": {"a": {"kind": "exact"}}, "clip": [1, -1]},
            "rewards.sums.clip",
            "[1.0, -1.0] leaves no range (give the lower bound first",
        ),
        ({"kind": "stack", "parts": {"a": {"kind": "exakt"}}}, "rewards.sums.parts.a", "kind 'exakt' is unknown"),
        (
            {"kind": "stack", "parts": {"a": {"kind": "exact", "wieght": 2}}},
            "rewards.sums.parts.a.wieght",
            "did you mean weight?",
        ),
        ({"kind": "cascade", "steps": [{"kind": "exact"}]}, "rewards.sums.steps", "a cascade with one step has nowhere to go"),
        ({"kind": "cascade", "steps": []}, "rewards.sums.steps", "a cascade with no steps has nowhere to go"),
        (overlong(buffer_tokens=-4), "rewards.sums.buffer_tokens", "greater than or equal to 1"),
        (overlong(buffer_tokens=65), "rewards.sums.buffer_tokens", "65 is more than max_tokens 64 (set it to at most 64)"),
        (
            {"kind": "length", "max_tokens": 64, "target_tokens": 64},
            "rewards.sums.target_tokens",
            "64 is not below max_tokens 64",
        ),
        ({"kind": "language", "scripts": ["roman"]}, "rewards.sums.scripts.0", "'latin'"),
        ({"kind": "language", "scripts": []}, "rewards.sums.scripts", "at least 1"),
        ({"kind": "env_reward"}, "rewards.sums", "nothing is earned in sums: it is neither in envs nor in agents"),
        ({"kind": "reasoning_gym"}, "data.train.0.kind", "is jsonl, but its reward is reasoning_gym"),
        (
            {"kind": "stack", "parts": {"mine": {"kind": "import", "path": "no_such_module_here:f"}}},
            "rewards.sums.parts.mine.path",
            "no module 'no_such_module_here' beside the YAML",
        ),
        (
            {
                "kind": "cascade",
                "steps": [{"kind": "exact"}, {"kind": "judge", "model": {"kind": "hosted", "model": "nowhere"}}],
            },
            "rewards.sums.steps.1.model.model",
            "'nowhere' is neither a folder nor a fetched model nor a hub id",
        ),
        ({"kind": "reward_model", "model": "nowhere"}, "rewards.sums.model", "neither a folder nor a fetched model"),
        (
            {
                "kind": "judge",
                "model": {"kind": "endpoint", "url": "http://localhost:1/v1", "model": "m"},
                "template": "{question} {anwser}",
            },
            "rewards.sums.template",
            "unknown placeholder {anwser}",
        ),
    ],
)
def test_what_is_wrong_with_a_reward_is_told_with_its_fix(
    tree: dict[str, Any], reward: dict[str, Any] | None, where: str, says: str
) -> None:
    tree["rewards"] = {"sums": reward} if reward else {}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    told = {violation.path: f"{violation.problem} ({violation.fix})" for violation in caught.value.violations}
    assert says in told[where]
    assert all(violation.fix for violation in caught.value.violations)


def test_a_default_reward_judges_domains_without_their_own_and_an_environment_needs_none(tree: dict[str, Any]) -> None:
    tree["rewards"] = {"default": {"kind": "numeric"}}
    tree["envs"] = {"lake": {"env": {"kind": "frozen_lake"}}}
    tree["data"]["train"].append({"kind": "env", "domain": "lake"})
    assert parse_config(tree)


def test_an_environment_may_have_a_stack_that_counts_what_it_earned(tree: dict[str, Any]) -> None:
    tree["rewards"] = {
        "sums": {"kind": "numeric"},
        "lake": {"kind": "stack", "parts": {"game": {"kind": "env_reward"}, "loops": {"kind": "repetition", "weight": 0.1}}},
    }
    tree["envs"] = {"lake": {"env": {"kind": "frozen_lake"}}}
    tree["data"]["train"].append({"kind": "env", "domain": "lake"})
    assert parse_config(tree)


STACK = {"kind": "stack", "parts": {"answer": {"kind": "numeric"}, "brief": overlong(max_tokens=8, buffer_tokens=4)}}


@pytest.mark.parametrize(
    ("reward", "weights", "where", "says"),
    [
        ({"kind": "numeric"}, {}, "rewards.sums", "has no parts, which advantage gdpo normalises one by one (domain sums)"),
        ({"kind": "code"}, {}, "rewards.sums", "has no parts"),
        ({"kind": "cascade", "steps": [STACK, {"kind": "exact"}]}, {}, "rewards.sums", "has no parts"),
        (
            STACK,
            {"answer": 1.0, "breif": 0.1},
            "advantage.weights.breif",
            "is no part of any reward (choose among: answer, brief",
        ),
    ],
)
def test_gdpo_is_refused_where_the_reward_cannot_have_the_parts_it_needs(
    tree: dict[str, Any], reward: dict[str, Any], weights: dict[str, float], where: str, says: str
) -> None:
    tree |= {"rewards": {"sums": reward}, "algorithm": "gdpo", "advantage": {"kind": "gdpo", "weights": weights}}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    told = {violation.path: f"{violation.problem} ({violation.fix})" for violation in caught.value.violations}
    assert says in told[where]


def test_gdpo_is_accepted_with_a_stack_and_with_code_that_may_have_parts(tree: dict[str, Any]) -> None:
    tree["algorithm"] = "gdpo"
    for reward in (STACK, {"kind": "import", "path": "json:dumps"}):
        assert parse_config({**tree, "rewards": {"sums": reward}}).advantage.kind == "gdpo"
