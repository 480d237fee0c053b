"""docs/add-an-environment.md, followed to the letter: its blocks are written out and run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from episode_fakes import trained_samples

from reroll.config.load import load_config
from reroll.pipeline.run import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-an-environment.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"```(?:python|yaml)\n# (.+?)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_block_of_the_page_says_where_it_goes() -> None:
    assert FILES.keys() == {"my_env.py", "my_env.yaml", "my_agent.py", "my_agent.yaml"}
    assert len(FILES) == PAGE.count("```python") + PAGE.count("```yaml")


def test_the_pages_environment_passes_the_checker(reroll: Callable[..., Any], folder: Path) -> None:
    done = reroll("envs", "check", "my_env:HigherLower", "highest=50", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout


@pytest.mark.parametrize("name", ["my_env", "my_agent"])
def test_the_pages_configs_train(folder: Path, tiny_model: Path, name: str) -> None:
    shorter = [f"policy.model={tiny_model}", "policy.devices=cpu", "engine.devices=cpu", "run.steps=2"]
    smaller = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=6"]
    few = [f"data.eval.0.num={2}"] if name == "my_env" else ["data.train.0.size=20"]
    outcome = train(load_config(folder / f"{name}.yaml", [*shorter, *smaller, *few]), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    samples = trained_samples(outcome.folder)
    assert samples
    assert all(sample.turns for sample in samples)
