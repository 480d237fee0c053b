"""Whole runs that generate with vLLM, on the CPU and in the trainer's process. Oracle: the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")


@pytest.fixture
def vllm_tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    model = make_tiny(tmp_path / "model", hidden=128, max_positions=256)  # Heads of 32: vLLM takes no smaller ones.
    rlvr_tree["policy"]["model"] = str(model)
    rlvr_tree["data"]["eval"] = []
    rlvr_tree["engine"] = {"kind": "vllm", "devices": "cpu", "max_running": 16, "cpu_cache_gib": 0.1, "enforce_eager": True}
    return rlvr_tree


def run(tree: dict[str, Any]) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def steps(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_a_run_on_vllm_is_the_run_on_the_embedded_engine(vllm_tree: dict[str, Any]) -> None:
    on_vllm = steps(run(vllm_tree))
    embedded = steps(run(vllm_tree | {"engine": {"devices": "cpu"}, "run": vllm_tree["run"] | {"name": "embedded"}}))
    assert [row["step"] for row in on_vllm] == [1, 2, 3]
    assert max(row["train/sampler_gap_max"] for row in on_vllm) < 2e-5
    for name in ("reward/mean", "train/loss", "rollout/completion_tokens"):
        assert [row[name] for row in on_vllm] == pytest.approx([row[name] for row in embedded], abs=1e-4)


def test_an_adapter_reaches_vllm_merged(vllm_tree: dict[str, Any]) -> None:
    vllm_tree["policy"] |= {"lora": {"rank": 8, "alpha": 16}, "optim": {"lr": 3e-2}}
    assert max(row["train/sampler_gap_max"] for row in steps(run(vllm_tree))) < 2e-5


def test_generation_that_overlaps_training_says_which_weights_wrote_what(vllm_tree: dict[str, Any]) -> None:
    vllm_tree["rollout"]["max_staleness"] = 1
    staleness = [row["rollout/staleness_max"] for row in steps(run(vllm_tree))]
    assert max(staleness) <= 1
