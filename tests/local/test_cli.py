"""The command line as a user types it: what a new process loads, and all else in this one.

A training in a process of its own is what tests/local/test_wheel.py and test_plug_in.py start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def config_file(rlvr_tree: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(rlvr_tree))
    return file


def test_importing_reroll_and_asking_for_help_loads_neither_torch_nor_ray() -> None:
    script = (
        "import sys, reroll, reroll.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(reroll.cli.app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_loads_neither_torch_nor_ray(config_file: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom reroll.config.load import load_config\n"
        f"load_config(Path({str(config_file)!r}))\n"
        "sys.exit(1 if {'torch', 'ray', 'transformers'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_check_accepts_a_sound_config_and_expands_it(reroll: CommandLine, config_file: Path) -> None:
    assert reroll("check", str(config_file)).returncode == 0
    expanded = reroll("check", "--expand", str(config_file), "rollout.group_size=8")
    tree = yaml.safe_load(expanded.stdout)
    assert tree["rollout"]["group_size"] == 8
    assert tree["loss"] == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def test_check_lists_every_violation_and_exits_with_2(reroll: CommandLine, config_file: Path) -> None:
    done = reroll("check", str(config_file), "rollout.group_size=1", "policy.devices=0-3", "data.train.0.path=x.jsonl", "foo=1")
    assert done.returncode == 2
    for word in ("rollout.group_size", "policy.devices", "data.train.0.path", "foo", "→"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_train_then_eval_from_the_command_line(reroll: CommandLine, config_file: Path, tmp_path: Path) -> None:
    done = reroll("train", str(config_file), "run.steps=2", "run.name=cli")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    checkpoint = tmp_path / "runs" / "cli" / "checkpoints" / "step-000002"
    out = tmp_path / "eval.json"
    run, config = str(tmp_path / "runs" / "cli"), str(config_file)
    done = reroll("eval", run, "-c", config, "rollout.temperature=0.5", "-k", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert f"{checkpoint}: 10 prompts, 2 samples each at temperature 0.5" in done.stdout  # of the newest checkpoint
    assert "pass@2" in done.stdout
    written = json.loads(out.read_text())
    assert written["metrics"]["eval/pass@2"] >= 0
    assert written["settings"]["temperature"] == 0.5
    again = reroll("train", str(config_file), "run.steps=2", "run.name=cli")
    assert again.returncode == 1
    assert "--resume" in again.stderr
    assert "Traceback" not in again.stderr
