"""Whole runs in which trainer and engine are equal to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.errors import ConfigError, SamplerMismatch
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.training.loss import PolicyLoss


def run(tree: dict[str, Any]) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


@pytest.fixture
def exact_tree(rlvr_tree: dict[str, Any]) -> dict[str, Any]:
    rlvr_tree["policy"] |= {"exact": True, "strategy": {"precision": "bf16"}}
    rlvr_tree["rollout"]["temperature"] = 0.9
    rlvr_tree["old_policy"] = "sampler"
    return rlvr_tree


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": {"lora": {"rank": 4}, "optim": {"lr": 5e-2}}},
        {"policy": {"strategy": {"precision": "fp32", "gradient_checkpointing": True}}},
        {"rollout": {"max_staleness": 1}, "engine": {"new_weights": "read_again"}},
    ],
    ids=["bf16", "lora", "checkpointing", "stale"],
)
def test_in_a_whole_run_no_log_prob_differs_and_the_ratio_is_one(exact_tree: dict[str, Any], changes: dict[str, Any]) -> None:
    for part, fields in changes.items():
        exact_tree[part] |= fields
    outcome = run(exact_tree)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert all(row.get("train/sampler_gap_current", 0.0) == 0 for row in steps)
    if "rollout" not in changes:
        assert all(row["train/sampler_gap_max"] == 0 and row["train/ratio"] == row["train/ratio_max"] == 1 for row in steps)


def test_a_single_bit_ends_the_run_and_the_token_is_named(exact_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = PolicyLoss._gaps_by_age

    def disturbed(self: PolicyLoss, batch: Any, logp: Any) -> Any:
        wrong = batch.logp.clone()
        token = int(batch.loss_mask.nonzero()[2])
        wrong[token] = wrong[token].nextafter(wrong.new_zeros(()))
        return original(self, batch.replace(logp=wrong), logp)

    monkeypatch.setattr(PolicyLoss, "_gaps_by_age", disturbed)
    with pytest.raises(
        SamplerMismatch, match=r"log-probs of 1 tokens by version 0 .* The first is token \d+ \(id \d+\) of row 0"
    ):
        run(exact_tree)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"engine": {"precision": "fp32"}}, "set engine.precision to same"),
        ({"rollout": {"max_staleness": 1}}, "set engine.new_weights to read_again"),
        ({"runtime": {"kind": "processes"}}, "set runtime.kind to local"),
        ({"policy": {"strategy": {"kind": "fsdp2"}}}, "set policy.strategy.kind to torch"),
        ({"engine": {"kind": "vllm"}}, "set engine.kind to embedded"),
        ({"policy": {"devices": "0"}}, "give policy.devices and engine.devices GPUs, or cpu, both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_exact_is_refused_with_the_fix(exact_tree: dict[str, Any], changes: dict[str, Any], fix: str) -> None:
    for part, fields in changes.items():
        exact_tree[part] = exact_tree.get(part, {}) | fields
    with pytest.raises(ConfigError) as refused:
        parse_config(exact_tree, folder=Path(exact_tree["run"]["runs_dir"]).parent)
    assert fix in str(refused.value)
