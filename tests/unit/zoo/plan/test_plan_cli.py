"""`reroll plan`, and what `reroll check` and `reroll train` refuse because of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import reroll_zoo.plan.plan as plan_module
from reroll.cli import app
from reroll.config.load import load_config, parse_config
from reroll.errors import ConfigError
from reroll.pipeline import preflight
from reroll_zoo.plan.plan import cluster_here

EXAMPLES = Path(__file__).parents[4] / "examples"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("file", sorted((EXAMPLES / "clusters").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_cluster_example_fits_its_cluster(file: Path, tmp_path: Path) -> None:
    code, output = run("plan", str(file), "--out", str(tmp_path / "plan.svg"))
    assert code == 0, output
    assert "predicted" in output
    assert "e+0" not in (tmp_path / "plan.svg").read_text(), "1,262 s, not 1.26e+03 s"


def test_a_plan_names_what_auto_chose_so_that_it_can_be_written_down() -> None:
    file = str(EXAMPLES / "clusters" / "qwen3_32b_auto.yaml")
    _, output = run("plan", file)
    chosen = next(line for line in output.splitlines() if line.startswith("chosen "))
    again = run("plan", file, *chosen.removeprefix("chosen ").split())[1]
    step = next(line for line in output.splitlines() if line.startswith("one step"))
    assert step in again
    assert "chosen" not in again


def test_the_machines_can_be_told_on_the_command_line_and_a_smaller_one_is_refused() -> None:
    file = str(EXAMPLES / "clusters" / "qwen3_8b_colocated.yaml")
    assert "8 × h200" in run("plan", file, "--device", "h200")[1]
    code, output = run("plan", file, "--device", "rtx4090")
    assert code == 1
    assert "does not fit" in output
    assert "→" in output


def test_pipelines_without_an_engine_are_planned_too() -> None:
    code, output = run("plan", str(EXAMPLES / "smollm2_dpo.yaml"), "policy.model=Qwen/Qwen3-0.6B", "--device", "a100")
    assert code == 0
    assert "reference" in output
    assert "generate" not in output


def test_planning_loads_neither_torch_nor_ray() -> None:
    script = f"""
import sys
from reroll.cli import app
try:
    app(["plan", {str(EXAMPLES / "clusters" / "qwen3_8b_colocated.yaml")!r}])
except SystemExit as end:
    assert end.code == 0
assert not {{"torch", "ray", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def too_large(rlvr_tree: dict[str, Any]) -> dict[str, Any]:
    rlvr_tree["policy"] |= {"model": "Qwen/Qwen3-8B", "devices": 0}
    rlvr_tree["engine"] = {"devices": 0}
    rlvr_tree["runtime"] = {"kind": "ray"}
    rlvr_tree["cluster"] = {"device": "rtx4090", "num": 1}
    return rlvr_tree


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_map_that_cannot_fit_is_refused_before_anything_starts(
    command: str, rlvr_tree: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(too_large(rlvr_tree)))
    with pytest.raises(ConfigError, match=r"device 0 would hold .* GiB \(train\): .*policy gradients"):
        run(command, str(file))
    assert not (tmp_path / "runs").exists()


def test_this_machines_gpus_are_known_by_the_name_their_driver_gives(
    monkeypatch: pytest.MonkeyPatch, rlvr_tree: dict[str, Any]
) -> None:
    config = parse_config(rlvr_tree, runs_here=False)

    def see(*names: str) -> None:
        monkeypatch.setattr(plan_module, "gpu_names", lambda: list(names))
        monkeypatch.setattr(plan_module, "num_visible_gpus", lambda: len(names))

    see("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    found = cluster_here(config)
    assert found is not None
    assert (found.spec.name, found.num_devices) == ("h100", 2)
    see("NVIDIA GeForce RTX 4090")
    assert (found := cluster_here(config)) is not None
    assert found.spec.name == "rtx4090"
    see("NVIDIA A100-SXM4-40GB")
    assert cluster_here(config) is None, "half the memory of the one that is known"
    see()
    assert (here := cluster_here(config)) is not None
    assert here.spec.name == "cpu"
    monkeypatch.setattr(plan_module, "host_memory_bytes", lambda: 24 * 2**30)
    named = parse_config(rlvr_tree | {"cluster": {"device": "cpu"}}, runs_here=False)
    for config_of_a_cpu in (config, named):
        assert (found := cluster_here(config_of_a_cpu)) is not None
        assert found.spec.memory_gib == 24, "the CPU is this machine's, also where it is named"


def test_a_device_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"b200.*h100, h200, a100, l40s, rtx4090, cpu"):
        run("plan", str(EXAMPLES / "clusters" / "qwen3_8b_colocated.yaml"), "--device", "b200")


def test_a_cluster_that_cannot_be_seen_from_here_must_be_named(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    rlvr_tree["runtime"] = {"kind": "ray", "address": "auto"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(rlvr_tree))
    with pytest.raises(ConfigError, match="--device h100 --num 8"):
        run("plan", str(file))
    assert run("plan", str(file), "--device", "h100", "cluster.efficiency.train=0.5")[0] == 0


def test_a_run_that_is_too_large_only_at_its_very_worst_is_planned_as_such_and_may_start() -> None:
    file = str(EXAMPLES / "clusters" / "qwen3_8b_colocated.yaml")
    larger = ["engine.max_running=192", "rollout.prompts_per_step=192"]
    assert run("plan", file, *larger)[0] == 1, "192 sequences of 2560 tokens on each device take 67.5 GiB"
    config = load_config(Path(file), larger, runs_here=False)
    assert preflight.memory_violations(config) == ([], []), "of 1536 tokens they take 40.5"


def test_what_is_too_large_by_an_estimate_alone_starts_with_a_note(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["policy"] |= {"model": "Qwen/Qwen3-0.6B", "devices": 0, "strategy": {"micro_batch_tokens": 65536}}
    rlvr_tree |= {"engine": {"devices": 0}, "cluster": {"device": "rtx4090", "num": 1}}
    refused, notes = preflight.memory_violations(parse_config(rlvr_tree, runs_here=False))
    assert not refused
    assert "policy activations" in notes[0]
    assert "if memory runs out, any one of these fits" in notes[0]


@pytest.mark.parametrize(("devices", "problem"), [("0-7", "names GPU 4, 5, 6, 7"), ("0-x", "names no devices")])
def test_devices_that_the_cluster_does_not_have_are_refused(devices: str, problem: str) -> None:
    file = str(EXAMPLES / "clusters" / "qwen3_8b_colocated.yaml")
    with pytest.raises(ConfigError, match=problem):
        run("plan", file, "--num", "4", f"policy.devices={devices}", "engine.devices=auto")
