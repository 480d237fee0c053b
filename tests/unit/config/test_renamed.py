"""Fields under their names of before: refused with the new name, and read where an earlier run wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.explain import RENAMED
from reroll.config.load import dump_config, load_config, parse_config
from reroll.errors import ConfigError

OLD = {
    "trace": ({"advantage": {"kind": "gae", "trace": 0.9}, "critic": {"kind": "shared"}}, "advantage.trace", "gae_lambda: 0.9"),
    "place": ({"kl": {"coef": 0.1, "place": "reward"}}, "kl.place", 'apply_to: "reward"'),
    "solved_outside": ({"masks": {"solved_outside": [0.1, 0.9]}}, "masks.solved_outside", "keep_pass_rate: [0.1, 0.9]"),
    "newest": ({"data": {"curriculum": {"kind": "filter", "newest": 0.5}}}, "data.curriculum.newest", "ema_weight: 0.5"),
    "window": ({"rollout": {"window": 1}}, "rollout.window", "take_window: 1"),
    "redundant": ({"rollout": {"redundant": 2}}, "rollout.redundant", "extra_samples: 2"),
    "drop_no_signal": ({"rollout": {"drop_no_signal": True}}, "rollout.drop_no_signal", "drop_zero_variance_groups: true"),
    "ending": (
        {"rewards": {"default": {"kind": "reward_model", "model": "m", "ending": "template"}}},
        "rewards.default.ending",
        'score_at: "template"',
    ),
    "tensor_parallel": ({"engine": {"kind": "vllm", "tensor_parallel": 2}}, "engine.tensor_parallel", "tp: 2"),
    "offload": ({"policy": {"offload": "optimizer"}}, "policy.offload", 'swap: "optimizer"'),
    "offload of a strategy": (
        {"policy": {"strategy": {"kind": "fsdp2", "offload": True}}},
        "policy.strategy.offload",
        "cpu_offload: true",
    ),
    "offload of an engine": ({"engine": {"offload": "all"}}, "engine.offload", "sleep: true"),
}


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(tree[key], value) for key, value in changes.items() if isinstance(tree.get(key), dict)}
    return {**tree, **changes, **both}


@pytest.mark.parametrize(("changes", "path", "fix"), OLD.values(), ids=OLD)
def test_the_old_name_is_refused_with_the_new_one(tree: dict[str, Any], changes: dict[str, Any], path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(merged(tree, changes))
    told = {violation.path: violation.fix for violation in raised.value.violations}
    assert told[path].endswith(f"write {fix}")


def test_every_renamed_field_is_tried() -> None:
    assert {name.split()[0] for name in OLD} == set(RENAMED)


def test_the_old_name_of_a_kind_is_refused_with_the_new_one_and_read_where_an_earlier_run_wrote_it(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    env, rewards = {"env": {"kind": "sokoban"}}, {"game": {"kind": "stack", "parts": {"won": {"kind": "earned"}}}}
    changes = {"envs": {"game": env}, "rewards": {**tree["rewards"], **rewards}}
    with pytest.raises(ConfigError, match=r"rewards.game.parts.won: kind 'earned' is unknown \(it is called env_reward now; "):
        parse_config({**tree, **changes})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**tree, **changes}))
    assert load_config(file, is_of_run=True).rewards["game"].parts["won"].kind == "env_reward"


def test_the_config_of_an_earlier_run_is_read(tree: dict[str, Any], tmp_path: Path) -> None:
    now = {"kl": {"coef": 0.1, "estimator": "k1", "apply_to": "reward"}, "engine": {"sleep": True}}
    now |= {"policy": {"swap": "optimizer"}, "rollout": {"extra_samples": 1}}
    config = parse_config(merged(tree, now))
    whole = yaml.safe_load(dump_config(config))
    for section, name, old, value in (
        ("kl", "apply_to", "place", "reward"),
        ("engine", "sleep", "offload", "all"),
        ("policy", "swap", "offload", "optimizer"),
        ("rollout", "extra_samples", "redundant", 1),
        ("rollout", "take_window", "window", 1),
    ):
        del whole[section][name]
        whole[section][old] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    assert load_config(file, is_of_run=True) == config
    with pytest.raises(ConfigError):
        load_config(file)


def test_what_is_no_longer_a_field_is_passed_over_in_the_config_of_an_earlier_run(tree: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(tree)
    whole = yaml.safe_load(dump_config(config))
    whole["run"]["log_samples"] = 4
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    assert load_config(file, is_of_run=True) == config
    with pytest.raises(ConfigError, match="log_samples"):
        load_config(file)
