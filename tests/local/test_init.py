"""A project of `reroll init` is sound, and trains as it is written (a smaller model, fewer steps)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.load import load_config
from reroll.pipeline.run import train

SMALL = ["run.steps=1", "eval.every=0", "policy.strategy.precision=fp32", "rollout.group_size=2", "rollout.prompts_per_step=2"]


@pytest.mark.parametrize("template", ["reward", "environment"])
def test_a_new_project_trains(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    folder = tmp_path / "my first project"
    made = CliRunner().invoke(app, ["init", str(folder), "--template", template])
    assert made.exit_code == 0, made.output
    monkeypatch.chdir(folder)
    held_out = "data.eval=[]"  # Hundreds of answers of a model that has learned nothing.
    config = load_config(folder / "config.yaml", [f"policy.model={tiny_model}", held_out, *SMALL])
    outcome = train(config, code_folder=folder)
    assert outcome.num_steps == 1
    assert (folder / "runs" / "my-first-project" / "metrics.jsonl").is_file()


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    refused = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert refused.exit_code == 2
    assert "config.yaml" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, ["init", str(tmp_path / "file")], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "cannot be written" in result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_no_held_out_row_is_trained_on(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", str(tmp_path)])
    train_rows, held_out = ((tmp_path / name).read_text().splitlines() for name in ("train.jsonl", "held_out.jsonl"))
    assert len(train_rows) > len(held_out) > 0
    assert not set(train_rows) & set(held_out)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["name"]
