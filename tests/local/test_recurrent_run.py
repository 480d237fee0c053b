"""A whole run on a model with layers that carry a state: trainer and engine agree, and it goes on as if never interrupted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny

DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    folder = make_tiny(tmp_path / "delta", family="qwen3_5_text", hidden=32, initializer_range=0.2, seed=3, **DELTA)
    rlvr_tree["policy"] |= {"model": str(folder), "optim": {"lr": 3e-3}}
    rlvr_tree["data"]["eval"] = []
    return rlvr_tree


def run(tree: dict[str, Any], **options: Any) -> tuple[Outcome, list[float]]:
    """What came of it, and the largest difference of a log-prob between trainer and engine in each step."""
    folder = Path(tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(copy.deepcopy(tree), folder=folder), code_folder=folder, **options)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return outcome, [row["train/sampler_gap_max"] for row in rows if "train/loss" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_trainer_and_engine_agree_and_a_resumed_run_is_the_uninterrupted_one(tree: dict[str, Any]) -> None:
    whole, gaps = run(tree)
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
    start, end = weights(Path(tree["policy"]["model"])), weights(whole.checkpoint)
    assert not any(torch.equal(start[name], end[name]) for name in start if "linear_attn" in name)
    tree["run"]["name"] = "parts"
    run(tree | {"run": tree["run"] | {"steps": 1}})
    parts, _ = run(tree, resume=True)
    resumed = weights(parts.checkpoint)
    assert all(torch.equal(resumed[name], weight) for name, weight in end.items())
