"""`reroll check` finds everything at once, and says how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.load import dump_config, load_config, parse_config
from reroll.config.presets import presets
from reroll.errors import ConfigError


def violations(tree: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    for violation in caught.value.violations:
        assert violation.fix, f"{violation.path} has no fix"
    return {violation.path: f"{violation.problem} ({violation.fix})" for violation in caught.value.violations}


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node: Any = tree
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[int(last) if isinstance(node, list) else last] = value


def test_a_sound_config_passes(tree: dict[str, Any]) -> None:
    assert parse_config(tree).pipeline == "rlvr"


@pytest.mark.parametrize(
    ("path", "value", "where", "says"),
    [
        ("rollout.max_tokns", 3, "rollout.max_tokns", "did you mean max_tokens?"),
        ("data.train.0.pth", "x", "data.train.0.pth", "did you mean path?"),
        ("rewards.default.patern", "x", "rewards.default.patern", "did you mean pattern?"),
        ("rollout.max_tokens", "many", "rollout.max_tokens", "integer"),
        ("rollout.temperature", -1, "rollout.temperature", "greater than 0"),
        ("rollout.group_size", 1, "rollout.group_size", "at least 2"),
        ("train.mini_batches", 3, "train.mini_batches", "one of: 1, 2, 4, 8, 16"),
        ("rollout.min_tokens", 65, "rollout.min_tokens", "at most 64"),
        ("rollout.max_tokens", 500, "rollout.max_tokens", "context of 512"),
        ("policy.strategy.micro_batch_tokens", 100, "policy.strategy.micro_batch_tokens", "at least 128"),
        ("policy.devices", "0-3", "policy.devices", "does not exist"),
        ("engine.devices", "seven", "engine.devices", "names no devices"),
        ("data.train.0.path", "gone.jsonl", "data.train.0.path", "does not exist"),
        ("data.train.0.kind", "csv", "data.train.0", "'csv' is unknown"),
        ("data.train.0.domain", "math", None, ""),  # the default reward judges it
        ("policy.model", "nowhere", "policy.model", "neither a folder"),
        ("rewards.default", {"kind": "numeric", "pattern": "("}, "rewards.default.pattern", "regular expression"),
        ("rewards.default", {"kind": "reasoning_gym"}, "data.train.0.kind", "reasoning_gym"),
        ("rewards.default", {"kind": "import", "path": "no_such_module_here:f"}, "rewards.default.path", "no module"),
        ("rewards", {"math": {"kind": "exact"}}, "data.train.0.domain", "no reward"),
        ("rewards", {"default": {}}, "rewards.default", "one of exact, numeric, math"),
        ("eval.every", 5, "eval.every", "data.eval is empty"),
        ("eval.samples", 4, "eval.samples", "greedy"),
        ("rollout.take_window", 2, "rollout.take_window", "at most 1"),
        ("rollout.long_rounds", True, "rollout.long_rounds", "set rollout.oversample to 1.25"),
        ("algorithm", "grpoo", "algorithm", "did you mean grpo?"),
        ("pipeline", "rlhf", "pipeline", "rlvr, agentic, sft"),
    ],
)
def test_each_violation_is_caught_with_its_fix(
    tree: dict[str, Any], path: str, value: Any, where: str | None, says: str
) -> None:
    put(tree, path, value)
    if where is None:
        assert parse_config(tree)
    else:
        assert says in violations(tree)[where]


def test_ranks_that_share_a_sequence_hold_it_together(tree: dict[str, Any]) -> None:
    put(tree, "policy.strategy", {"kind": "fsdp2", "sp": 2, "micro_batch_tokens": 63})
    assert "63 on 2 ranks" in violations(tree)["policy.strategy.micro_batch_tokens"]
    assert "at least 64" in violations(tree)["policy.strategy.micro_batch_tokens"]
    put(tree, "policy.strategy.micro_batch_tokens", 64)
    assert "policy.strategy.micro_batch_tokens" not in violations(tree)


def test_all_violations_are_listed_at_once_even_beside_a_missing_field(tree: dict[str, Any]) -> None:
    del tree["policy"]["model"]
    put(tree, "rollout.group_size", 1)
    put(tree, "rollout.speed", 9)
    put(tree, "data.train.0.path", "gone.jsonl")
    assert set(violations(tree)) == {"policy.model", "rollout.group_size", "rollout.speed", "data.train.0.path"}


def test_overrides_are_typed_and_reach_into_lists(tree: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    config = load_config(file, ["rollout.group_size=16", "data.train.0.domain=sums", "policy.optim.lr=1e-3", "run.name=a1"])
    assert config.pipeline == "rlvr"
    assert (config.rollout.group_size, config.data.train[0].domain) == (16, "sums")
    assert (config.policy.optim.lr, config.run.name) == (1e-3, "a1")


def test_a_malformed_override_and_an_unreadable_file_are_config_errors(tree: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="not key=value"):
        load_config(file, ["rollout.group_size"])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    file.write_text("a: [1")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(file)


@pytest.mark.parametrize("name", presets())
def test_every_preset_expands_to_plain_fields(tree: dict[str, Any], name: str) -> None:
    tree["algorithm"] = name
    tree["rollout"]["group_size"] = 8
    if name == "gdpo":
        tree["rewards"]["default"] = {"kind": "stack", "parts": {"right": {"kind": "exact"}, "close": {"kind": "numeric"}}}
    if name in ("opd", "gkd"):
        tree["teachers"] = {"big": {"model": "some/teacher"}}
    config = parse_config(tree)
    assert config.pipeline == "rlvr"
    assert config.loss.kind == presets()[name]["loss"]["kind"]
    assert config.advantage.kind == presets()[name].get("advantage", {"kind": "normalised"})["kind"]


def test_what_the_user_writes_wins_over_the_preset(tree: dict[str, Any]) -> None:
    tree |= {"algorithm": "grpo", "loss": {"clip_high": 0.28}, "advantage": {"kind": "opo"}}
    config = parse_config(tree)
    assert config.pipeline == "rlvr"
    assert config.loss.kind == "ppo"
    assert config.loss.clip_high == 0.28
    assert config.advantage.kind == "opo"


def test_a_dumped_config_loads_back_equal(tree: dict[str, Any]) -> None:
    config = parse_config(tree)
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_nothing_can_be_changed_after_loading(tree: dict[str, Any]) -> None:
    config = parse_config(tree)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]
