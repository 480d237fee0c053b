"""Every algorithm by its name: it loads, it expands to plain fields, and it trains (most of them with -m slow)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.load import dump_config, parse_config
from reroll.config.presets import presets
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny

REPRESENTATIVES = {
    "dapo": "drops groups without a signal, masks what was cut off",
    "gdpo": "a reward in parts",
    "otb": "score norms of the tokens",
    "gspo": "a ratio for each sequence",
    "clip_cov": "tokens selected over the whole batch",
    "dppo_tv": "the sampler as the old policy, a fixed length as denominator",
    "raft++": "masks tokens without an advantage",
    "icepop": "corrections that mask",
}
"""Presets that are trained in every run of the tests, with what no other whole run asks for. Their formulas are held by
tests/unit/algo; the other presets are combinations of the same parts, and are trained with -m slow."""

REWARDS = """
from reroll.types import Score

def digits_and_letters(prompt, trajectory):
    digits = sum(character.isdigit() for character in trajectory.text) / 6
    letters = sum(character.isalpha() for character in trajectory.text) / 6
    return Score(value=digits + letters, parts={"digits": digits, "letters": letters})
"""


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two short steps. Any number earns the reward, so that an untrained model has a signal."""
    (tmp_path / "reroll_test_parts.py").write_text(REWARDS)
    rlvr_tree["run"]["steps"] = 2
    rlvr_tree["rollout"] |= {"prompts_per_step": 2, "group_size": 6, "stop": list("aeiou")}  # or all would be cut off
    rlvr_tree["rewards"] = {"default": {"kind": "numeric", "tolerance": 1e9}}
    rlvr_tree["data"]["eval"] = []
    return rlvr_tree


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "teacher", hidden=32, heads=4, seed=4)


def config_of(preset: str, tree: dict[str, Any], teacher: Path) -> RlvrConfig:
    """The preset with what it cannot do without: a teacher, a reward in parts, a critic that learns."""
    needs: dict[str, dict[str, Any]] = {
        "opd": {"teachers": {"other": {"model": str(teacher)}}},
        "gkd": {"teachers": {"other": {"model": str(teacher)}}},
        "gdpo": {"rewards": {"default": {"kind": "import", "path": "reroll_test_parts:digits_and_letters"}}},
        "ppo": {"critic": {"optim": {"lr": 1e-2}}},
    }
    if presets()[preset]["loss"]["kind"] != "reinforce":
        tree["train"] = {"mini_batches": 2}  # with one, every ratio would be 1
    config = parse_config(tree | {"algorithm": preset} | needs.get(preset, {}), folder=Path(tree["run"]["runs_dir"]).parent)
    assert isinstance(config, RlvrConfig)
    return config


@pytest.mark.parametrize("preset", presets())
def test_a_preset_expands_to_fields_that_mean_the_same(preset: str, tree: dict[str, Any], teacher: Path) -> None:
    config = config_of(preset, tree, teacher)
    expanded = yaml.safe_load(dump_config(config))
    assert parse_config(expanded, folder=Path(tree["run"]["runs_dir"]).parent) == config


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow) for name in presets()]
)
def test_a_preset_trains(preset: str, tree: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    outcome = train(config_of(preset, tree, teacher), code_folder=tmp_path)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["train/loss"]) for row in steps)
    assert max(row["train/grad_norm"] for row in steps) > 0, "nothing was learned"


def test_an_unknown_preset_is_answered_with_the_nearest_one(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'dapoo' is no preset.*did you mean dapo\?"):
        parse_config(tree | {"algorithm": "dapoo"})
