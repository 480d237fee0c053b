"""docs/write-a-plug-in.md, followed to the letter: its package is built, installed into a folder of its own, and used."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from episode_fakes import trained_samples

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-plug-in.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"```(?:python|yaml|toml)\n# (.+?)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS: list[str] = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package into, with its metadata and without its sources."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "reroll_dice" / "__init__.py").touch()
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dice.yaml").write_text(FILES["dice.yaml"])
    return tmp_path


def reroll(command: str, *more: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    words = [sys.executable, "-m", *shlex.split(command), *more]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_every_block_of_the_page_says_where_it_goes() -> None:
    parts = {"config.py", "env.py", "reward.py", "rows.py", "command.py"}
    assert FILES.keys() == {"pyproject.toml", "dice.yaml", *(f"reroll_dice/{part}" for part in parts)}
    assert len(FILES) == sum(PAGE.count(f"```{language}") for language in ("python", "yaml", "toml"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_run(site: Path, folder: Path, tiny_model: Path, command: str) -> None:
    more = [f"policy.model={tiny_model}"] if command.startswith("reroll check") else []
    done = reroll(command, *more, site=site, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_config_trains(site: Path, folder: Path, tiny_model: Path) -> None:
    shorter = [f"policy.model={tiny_model}", "policy.devices=cpu", "engine.devices=cpu", "run.steps=2", "data.eval.0.size=2"]
    smaller = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=6"]
    done = reroll("reroll train dice.yaml", *shorter, *smaller, site=site, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "runs/dice/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    assert {sample.domain for sample in trained_samples(folder / "runs/dice")} == {"game", "sums"}


def test_a_fault_in_the_options_of_its_kinds_is_told_with_its_fix(site: Path, folder: Path, tiny_model: Path) -> None:
    faults = ["envs.game.env.num_dice=0", "rewards.sums.widht=3", "data.train.1.kind=throw"]
    done = reroll("reroll check dice.yaml", f"policy.model={tiny_model}", *faults, site=site, cwd=folder)
    told = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert done.returncode != 0
    assert "envs.game.env.num_dice is 0 → it should be greater than or equal to 1" in told
    assert "rewards.sums.widht unknown key → did you mean width?" in told
    assert "data.train.1 kind 'throw' is unknown → did you mean throws? choose one of: jsonl, " in told


def test_without_the_package_its_kinds_are_unknown(folder: Path, tiny_model: Path) -> None:
    done = reroll("reroll check dice.yaml", f"policy.model={tiny_model}", site=folder, cwd=folder)
    assert "kind 'dice' is unknown" in done.stdout + done.stderr


def test_the_page_lists_what_the_zoo_may_import() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract.get("source_modules") == ["reroll_zoo"]]
    allowed = {line.partition(" -> ")[2] for line in contract["ignore_imports"] if line.startswith("reroll_zoo.** ")}
    table = PAGE.partition("## What a plug-in may import")[2]
    assert {module for module in allowed if f"`{module}`" not in table} == set()
