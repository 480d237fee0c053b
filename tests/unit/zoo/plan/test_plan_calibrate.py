"""Fitting the planner's efficiencies to what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.load import parse_config
from reroll.errors import ConfigError
from reroll_zoo.plan.calibrate import as_override, fitted, fragment, planned_seconds, read_measured
from reroll_zoo.plan.cluster import ClusterConfig, EfficiencyConfig

TREE: dict[str, Any] = {
    "pipeline": "rlvr",
    "algorithm": "grpo",
    "policy": {"model": "Qwen/Qwen3-0.6B", "devices": 0, "strategy": {"kind": "torch", "precision": "bf16"}},
    "engine": {"devices": 0, "max_running": 512},
    "data": {"train": [{"kind": "jsonl", "path": "p.jsonl"}]},
    "rewards": {"default": {"kind": "exact"}},
    "rollout": {"prompts_per_step": 64, "group_size": 8, "max_prompt_tokens": 100, "max_tokens": 256},
}
H200 = ClusterConfig(device="h200", num=1)
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "gpu_parts.json"


def config_of(**rollout: int) -> Any:
    return parse_config({**TREE, "rollout": {**TREE["rollout"], **rollout}}, runs_here=False)


def results(folder: Path, seconds: dict[str, float]) -> Path:
    names = {"generate": "engine writes", "update": "policy learns"}
    file = folder / "parts.json"
    file.write_text(json.dumps({"rows": [{"part": names[part], "wall_s": value} for part, value in seconds.items()]}))
    return file


@pytest.mark.parametrize("true", [{"train": 0.31, "decode": 0.42}, {"train": 0.05, "decode": 0.9}])
def test_machines_of_known_efficiency_are_found_from_one_batch_and_predict_another(
    tmp_path: Path, true: dict[str, float]
) -> None:
    machine = H200.model_copy(update={"efficiency": EfficiencyConfig(**true, length=1.0)})
    file = results(tmp_path, {part: planned_seconds(config_of(), machine)[part] for part in ("generate", "update")})
    found = fitted(read_measured(file, config_of()), H200)
    assert {key: dict(found)[key] for key in true} == pytest.approx(true, rel=1e-3)
    other = config_of(prompts_per_step=16, max_tokens=1024)
    predicted = planned_seconds(other, H200.model_copy(update={"efficiency": found}))
    assert predicted == pytest.approx(planned_seconds(other, machine), rel=1e-2)


def test_where_the_bandwidth_of_the_data_sheet_is_too_little_a_step_has_less_overhead(tmp_path: Path) -> None:
    machine = H200.model_copy(update={"efficiency": EfficiencyConfig(decode=1.0, step_overhead_ms=0.25, length=1.0)})
    file = results(tmp_path, {"generate": planned_seconds(config_of(), machine)["generate"]})
    found = fitted(read_measured(file, config_of()), H200)
    assert (found.decode, found.step_overhead_ms) == (1.0, pytest.approx(0.25, rel=1e-3))


def test_the_h200_that_was_measured_comes_out_as_its_times(tmp_path: Path) -> None:
    measured = read_measured(RESULTS, config_of())
    found = fitted(measured, H200)
    planned = planned_seconds(config_of(), H200.model_copy(update={"efficiency": found}))
    assert {part: planned[part] for part in measured.seconds} == pytest.approx(dict(measured.seconds), rel=1e-3)


def test_what_is_saved_is_what_plan_takes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**TREE, "cluster": {"device": "h200", "num": 1}}))
    (tmp_path / "parts.json").write_text(RESULTS.read_text())
    run, saved, runner = str(tmp_path / "run.yaml"), tmp_path / "cluster.yaml", CliRunner(env={"COLUMNS": "200"})
    first = runner.invoke(app, ["plan", run, "--calibrate", str(tmp_path / "parts.json"), "--save", str(saved)])
    again = runner.invoke(app, ["plan", run, "--cluster", str(saved)])
    step = next(line for line in first.output.splitlines() if line.startswith("one step"))
    assert step in again.output
    assert yaml.safe_load(fragment(H200, EfficiencyConfig()))["cluster"]["device"] == "h200"


@pytest.mark.parametrize("text", ["", "{}", '{"rows": []}', '{"rows": [{"part": "engine writes", "wall_s": "soon"}]}'])
def test_what_is_no_measurement_is_refused_with_what_to_give(tmp_path: Path, text: str) -> None:
    (tmp_path / "parts.json").write_text(text)
    for source in (tmp_path / "parts.json", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="gpu_parts"):
            read_measured(source, config_of())
    with pytest.raises(ConfigError, match="no cluster"):
        as_override(tmp_path / "parts.json")
