"""A whole run on a mixture of experts: trainer and engine route alike, and the checkpoint is an ordinary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture
def moe_tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    folder = make_tiny(tmp_path / "moe", family="qwen3_moe", hidden=32, initializer_range=0.2, seed=3)
    rlvr_tree["policy"] |= {"model": str(folder), "optim": {"lr": 3e-3}}
    rlvr_tree["data"]["eval"] = []
    return rlvr_tree


def run(tree: dict[str, Any]) -> tuple[Outcome, list[float]]:
    """What came of it, and the largest difference of a log-prob between trainer and engine in each step."""
    folder = Path(tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(tree, folder=folder), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return outcome, [row["train/sampler_gap_max"] for row in rows if "train/loss" in row]


def test_trainer_and_engine_route_alike_and_the_checkpoint_has_the_hubs_names(moe_tree: dict[str, Any]) -> None:
    outcome, gaps = run(moe_tree)
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
    start, end = (load_file(Path(folder) / "model.safetensors") for folder in (moe_tree["policy"]["model"], outcome.checkpoint))
    assert start.keys() == end.keys()
    assert not any(torch.equal(start[name], end[name]) for name in start if name.endswith("mlp.gate.weight"))
    assert AutoModelForCausalLM.from_pretrained(outcome.checkpoint).config.num_experts == 8


def metrics(tree: dict[str, Any]) -> list[dict[str, float]]:
    outcome, _ = run(tree)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_in_bf16_experts_are_replayed_with_the_tokens_of_a_resumed_run_too(moe_tree: dict[str, Any]) -> None:
    moe_tree["policy"]["strategy"] = {"kind": "torch", "precision": "bf16"}
    moe_tree["rollout"]["max_staleness"] = 1
    moe_tree["run"] |= {"steps": 2, "name": "short"}
    first = metrics(moe_tree)
    moe_tree["run"]["steps"] = 4
    folder = Path(moe_tree["run"]["runs_dir"]).parent
    resumed = train(parse_config(moe_tree, folder=folder), code_folder=folder, resume=True)
    rows = [json.loads(line) for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    replayed = [row for row in rows if "train/loss" in row]
    assert (len(first), len(replayed)) == (2, 4)
    assert all("train/routes_differ" in row for row in replayed)


def test_where_it_is_switched_off_nothing_is_replayed(moe_tree: dict[str, Any]) -> None:
    moe_tree["policy"]["replay_routes"] = False
    moe_tree["run"]["steps"] = 1
    assert "train/routes_differ" not in metrics(moe_tree)[0]


@pytest.mark.slow
def test_ranks_that_share_experts_out_publish_what_they_learned(moe_tree: dict[str, Any]) -> None:
    pytest.importorskip("ray")
    moe_tree["runtime"] = {"kind": "ray"}
    moe_tree["policy"]["strategy"] = {"kind": "fsdp2", "num_ranks": 2, "ep": 2}
    _, gaps = run(moe_tree)
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
