"""What `engine.precision: fp8` stands for in a config, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import dump_config, parse_config, read_yaml
from reroll.errors import ConfigError
from reroll.pipeline.guard import max_gap
from reroll.pipeline.preflight import preflight
from reroll.pipeline.run import train
from reroll_zoo.fp8 import linears
from reroll_zoo.fp8.check import violations
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run on what looks like a machine with two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    rlvr_tree["engine"] = {"devices": 0, "precision": "fp8"}
    return rlvr_tree


def corrections(tree: dict[str, Any]) -> tuple[str, list[tuple[str, str, float]]]:
    config: Any = parse_config(tree, runs_here=False)
    return config.old_policy, [(node.level, node.mode, node.high) for node in config.corrections]


TRUNCATED = [("token", "truncate", 2.0)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_samples_are_weighed_unless_the_config_says_otherwise(tree: dict[str, Any], staleness: int) -> None:
    tree["rollout"]["max_staleness"] = staleness
    assert corrections(dict(tree)) == ("trainer", TRUNCATED)
    assert corrections(tree | {"algorithm": "icepop"})[1] == [("token", "mask", 5.0)]
    assert corrections(tree | {"old_policy": "sampler"}) == ("sampler", [])
    assert corrections(tree | {"corrections": []})[1] == []
    assert corrections(tree | {"old_policy": "auto"})[1] == ([] if staleness else TRUNCATED)
    assert corrections(tree | {"engine": {"devices": 0}}) == ("auto", [])


def test_the_config_that_is_written_out_reads_the_same(tree: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(tree, folder=tmp_path)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert parse_config(read_yaml(tmp_path / "config.yaml"), folder=tmp_path) == config


def test_the_guards_limit_is_that_of_the_coarser_precision(tree: dict[str, Any]) -> None:
    fp8: Any = parse_config(tree, runs_here=False)
    bf16: Any = parse_config(tree | {"engine": {"devices": 0, "precision": "bf16"}}, runs_here=False)
    assert max_gap(fp8) > max_gap(bf16)


def refusals(tree: dict[str, Any]) -> list[str]:
    return [str(found) for found in violations(parse_config(tree, runs_here=False), opens=False)]


def test_a_cpu_is_refused_before_the_run(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusals(tree) == []
    on_cpu = {"devices": "cpu", "precision": "fp8"}
    with pytest.raises(ConfigError, match=r"engine.precision.*fp8.*CPU"):
        preflight(parse_config(tree | {"engine": on_cpu}, folder=tmp_path), code_folder=tmp_path)
    auto = tree | {"engine": {"precision": "fp8"}}
    assert refusals(auto) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(refusals(auto)) == 1


@pytest.mark.parametrize(
    ("card", "problem"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, "mostly experts"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "carry"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}, "see"),
    ],
)
def test_models_that_do_not_fit_are_told_by_their_config(
    tree: dict[str, Any], tmp_path: Path, card: dict[str, Any], problem: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(card))
    tree["policy"]["model"] = str(tmp_path / "other")
    [refusal] = refusals(tree)
    assert problem in refusal
    assert "set it to bf16" in refusal


def test_other_engines_do_not_have_it(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.precision"):
        parse_config(tree | {"engine": {"kind": "vllm", "devices": 0, "precision": "fp8"}})


def test_an_installation_that_does_not_know_it_is_told_to_reinstall(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reroll.config.check_engine.entry_names", lambda group: [])
    with pytest.raises(ConfigError, match=r"engine.precision.*no installed package.*pip install -e \."):
        parse_config(tree)


def test_exact_is_refused_beside_it(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["policy"]["exact"] = True
    with pytest.raises(ConfigError, match="the engine rounds to fp8"):
        parse_config(tree, folder=tmp_path)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_pushes_to_the_codes_and_the_guard_is_quiet(
    rlvr_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """On a CPU, which is refused otherwise: there the same is computed in plain PyTorch."""
    monkeypatch.setattr("reroll_zoo.fp8.check._is_on_cpu", lambda config: False)
    monkeypatch.setattr(linears, "quantize", linears.quantize_linears)
    rlvr_tree["policy"] |= {"model": str(make_tiny(tmp_path / "model")), "strategy": {"kind": "torch", "precision": "bf16"}}
    rlvr_tree["engine"]["precision"] = "fp8"
    rlvr_tree["rollout"]["max_staleness"] = staleness
    outcome = train(parse_config(rlvr_tree, folder=tmp_path), code_folder=tmp_path)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 3
    gaps = [row["train/sampler_gap_current"] for row in steps if "train/sampler_gap_current" in row]
    assert gaps
    assert all(0 < gap < 0.15 for gap in gaps)
    assert any("correction_token_truncate_weight" in name for name in steps[0])
