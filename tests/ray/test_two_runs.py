"""Two runs with a Ray of their own, started on one machine at the same time."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.load import parse_config
from reroll.pipeline.run import train


def curve(run_folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


@pytest.mark.slow
def test_two_runs_at_the_same_time_both_finish_with_the_curves_they_have_alone(rlvr_tree: dict[str, Any]) -> None:
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    alone, processes = {}, {}
    for seed in (1, 2):
        tree = copy.deepcopy(rlvr_tree)
        tree["run"] |= {"name": f"alone-{seed}", "seed": seed, "steps": 2}
        alone[seed] = curve(train(parse_config(tree, folder=folder), code_folder=folder).folder)
        tree["run"]["name"] = f"beside-{seed}"
        tree["runtime"] = {"kind": "ray"}
        (folder / f"{seed}.yaml").write_text(yaml.safe_dump(tree))
    for seed in (1, 2):
        command = [sys.executable, "-m", "reroll", "train", f"{seed}.yaml"]
        processes[seed] = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for seed, process in processes.items():
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert curve(folder / "runs" / f"beside-{seed}") == pytest.approx(alone[seed], abs=1e-6)
    assert alone[1] != alone[2]
