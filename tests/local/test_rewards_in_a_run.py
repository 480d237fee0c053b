"""Whole runs whose rewards are made of rewards: what reaches the metrics, and what a resumed run remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train


def run(tree: dict[str, Any], *, resume: bool = False) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), resume=resume, code_folder=folder)


def steps(outcome: Outcome) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


ENV = """
from reroll.envs.base import StepResult

class Generous:
    def reset(self, seed):
        return ({"role": "user", "content": f"say {seed}"},)

    def step(self, action):
        return StepResult(reward=0.25, terminated=True, info={"success": 1.0})

    def close(self):
        pass
"""


def test_a_stack_adds_to_what_an_environment_gives_and_success_still_decides(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "reroll_generous_env.py").write_text(ENV)
    env = {"kind": "import", "path": "reroll_generous_env:Generous"}
    rlvr_tree["envs"] = {"game": {"env": env, "actions": {"kind": "text"}}}
    rlvr_tree["env_workers"] = {"kind": "inline"}
    rlvr_tree["data"] = {
        "train": [{"kind": "env", "domain": "game", "num": 50}],
        "eval": [{"kind": "env", "domain": "game", "num": 2, "first_seed": 1000}],
    }
    parts = {"won": {"kind": "env_reward"}, "length": {"kind": "length", "max_tokens": 100, "weight": 0.5}}
    rlvr_tree["rewards"] = {"game": {"kind": "stack", "parts": parts}}
    outcome = run(rlvr_tree)
    last = steps(outcome)[-1]
    assert last["reward/game/won"] == 0.25
    assert last["reward/mean"] == pytest.approx(0.25 + 0.5 * last["reward/game/length"], abs=1e-6)
    assert last["reward/game/success"] == 1.0
    assert last["judging/game/scored"] >= 16
    assert outcome.evals[0]["eval/reward"] < 1.0 == outcome.evals[0]["eval/pass@1"]


def test_samples_whose_stack_has_a_part_that_fails_are_left_out_and_counted(rlvr_tree: dict[str, Any]) -> None:
    picky = {"kind": "import", "path": "reroll_test_rewards:raises_on_even"}
    rlvr_tree["rewards"] = {"default": {"kind": "stack", "parts": {"picky": picky, "exact": {"kind": "exact"}}}}
    rlvr_tree["rollout"]["max_failed_fraction"] = 1.0
    outcome = run(rlvr_tree)
    assert sum(row["judging/default/failed"] for row in steps(outcome)) >= 4
    journal = (outcome.folder / "journal" / "000000.jsonl").read_text()
    assert "picky: ValueError: I do not like even numbers" in journal


def test_the_scale_of_each_domain_is_remembered_when_a_run_resumes(rlvr_tree: dict[str, Any]) -> None:
    source = rlvr_tree["data"]["train"][0]
    rlvr_tree["data"] = {"train": [source | {"domain": "a"}, source | {"domain": "b"}]}
    digits = {"kind": "import", "path": "reroll_test_rewards:has_digit"}
    rlvr_tree["rewards"] = {"a": digits, "b": {"kind": "stack", "parts": {"digits": digits | {"weight": 100.0}}}}
    rlvr_tree |= {"algorithm": "dr_grpo", "shaping": {"domains": "normalised"}}
    whole = run(rlvr_tree | {"run": rlvr_tree["run"] | {"name": "whole"}})
    halved = rlvr_tree | {"run": rlvr_tree["run"] | {"name": "halved", "steps": 1}}
    run(halved)
    halved["run"]["steps"] = rlvr_tree["run"]["steps"]
    resumed = run(halved, resume=True)
    assert steps(resumed)[-1]["advantage/max"] == pytest.approx(steps(whole)[-1]["advantage/max"], rel=1e-5)
    assert steps(whole)[-1]["advantage/max"] < 5.0  # Raw, those of b would be up to a hundred.
