"""Whole runs on one GPU, which the policy and the engine share by lease."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.pipeline.run import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("precision", "gap"), [("fp32", 1e-3), ("bf16", 0.5)])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("runtime", ["local", "processes"])
def test_a_colocated_run_trains_and_the_log_probs_agree(
    rlvr_tree: dict[str, Any], precision: str, gap: float, staleness: int, runtime: str
) -> None:
    rlvr_tree["runtime"] = {"kind": runtime}
    rlvr_tree["policy"] |= {"devices": 0, "strategy": {"kind": "torch", "precision": precision}}
    rlvr_tree["engine"] = {"devices": 0}
    rlvr_tree["rollout"]["max_staleness"] = staleness
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 3
    assert max(row["rollout/staleness_max"] for row in steps) <= staleness
    if staleness == 0:
        assert max(row["train/sampler_gap_max"] for row in steps) < gap
