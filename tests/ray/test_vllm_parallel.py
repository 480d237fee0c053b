"""vLLM spread over two ranks inside a Ray actor, on the CPU. Oracle: the embedded engine in one process."""

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


def run(tree: dict[str, Any]) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def steps(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


@pytest.mark.slow
def test_a_vllm_engine_over_two_ranks_gives_the_run_of_the_embedded_engine(
    rlvr_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # Else vLLM wants a NUMA node for each rank.
    rlvr_tree["policy"]["model"] = str(make_tiny(tmp_path / "model", hidden=128, max_positions=256))
    rlvr_tree["data"]["eval"] = []
    engine = {"kind": "vllm", "devices": "cpu", "max_running": 16, "cpu_cache_gib": 0.1, "enforce_eager": True}
    spread = rlvr_tree | {"engine": {**engine, "tp": 2}, "runtime": {"kind": "ray"}}
    on_vllm = steps(run(spread))
    embedded = steps(run(rlvr_tree | {"run": rlvr_tree["run"] | {"name": "embedded"}}))
    assert [row["step"] for row in on_vllm] == [1, 2, 3]
    assert max(row["train/sampler_gap_max"] for row in on_vllm) < 2e-5
    for name in ("reward/mean", "train/loss", "rollout/completion_tokens"):
        assert [row[name] for row in on_vllm] == pytest.approx([row[name] for row in embedded], abs=1e-4)
