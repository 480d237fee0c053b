"""docs/add-a-reward.md, followed to the letter: its files are written out and its commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import load_config
from reroll.pipeline.run import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-reward.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"```(?:python|yaml|json)\n# (.+?)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS: list[str] = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_of_the_page_says_where_it_goes() -> None:
    assert FILES.keys() == {"my_reward.py", "my_reward.yaml", "sums.jsonl", "test_my_reward.py"}
    assert len(FILES) == sum(PAGE.count(f"```{language}") for language in ("python", "yaml", "json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_run(reroll: Callable[..., Any], folder: Path, tiny_model: Path, command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "reroll"
    more = [f"policy.model={tiny_model}"] if words[0] == "check" else []
    done = reroll(*words, *more, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_tests_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_reward.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_pages_config_trains_and_logs_every_part(folder: Path, tiny_model: Path) -> None:
    shorter = [f"policy.model={tiny_model}", "policy.devices=cpu", "engine.devices=cpu", "run.steps=2"]
    outcome = train(load_config(folder / "my_reward.yaml", shorter), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "train/loss" in row][-1]
    parts = ("answer", "answer.right", "answer.brief", "format", "length", "loops")
    assert {f"reward/sums/{part}" for part in parts} <= last.keys()
    weighted = last["reward/sums/answer"] + 0.1 * last["reward/sums/format"] + 0.5 * last["reward/sums/length"]
    assert last["reward/mean"] == pytest.approx(weighted + 0.2 * last["reward/sums/loops"])
    assert last["judging/sums/scored"] >= 16
    assert last["judging/sums/failed"] == 0
    assert last["judging/sums/wait_s"] <= last["judging/sums/latency_s"]
