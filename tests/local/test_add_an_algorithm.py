"""docs/add-an-algorithm.md, followed to the letter: its blocks are written out and run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reroll.config.load import load_config
from reroll.pipeline.run import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-an-algorithm.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"```(?:python|yaml|toml)\n# (.+?)\n(.*?)```", PAGE, re.DOTALL)
"""(where it goes, what it says) of every block of Python, YAML and TOML."""
FILES = {where: text for where, text in BLOCKS if "," not in where}
EDITS = [(where, text) for where, text in BLOCKS if "," in where]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader would work: the page's files."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_block_of_the_page_says_where_it_goes() -> None:
    assert len(BLOCKS) == sum(PAGE.count(f"```{language}") for language in ("python", "yaml", "toml"))
    assert FILES.keys() == {"make_task.py", "warm_up.yaml", "my_algorithm.py", "my_algorithm.yaml", "test_my_algorithm.py"}


def test_the_pages_task_warm_up_and_functions_train(folder: Path) -> None:
    runpy.run_path(str(folder / "make_task.py"))
    warm = train(load_config(folder / "warm_up.yaml", ["run.steps=2"]), code_folder=folder)
    shorter = [f"policy.model={warm.checkpoint}", "run.steps=2", "rollout.prompts_per_step=2", "eval.every=0"]
    any_number = "rewards.default={kind: numeric, tolerance: 1.0e+9}"  # what an untrained model can earn
    outcome = train(load_config(folder / "my_algorithm.yaml", [*shorter, any_number]), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert max(row["train/ratio_max"] for row in steps) > 1
    assert max(row["train/grad_norm"] for row in steps) > 0


def test_the_pages_tests_pass(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("test_my_algorithm", folder / "test_my_algorithm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_library_with_the_pages_edits_knows_and_tests_the_new_algorithms(tmp_path: Path) -> None:
    for package in ("reroll", "reroll_zoo"):
        # With what is compiled, which is good for the files that are not edited; but not what is being written just now.
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # It names the kinds.
    shutil.copytree(ROOT / "tests" / "unit" / "algo", tmp_path / "tests" / "unit" / "algo")
    for name in ("conftest.py", "local/test_presets.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    for where, text in EDITS:
        edit(tmp_path, where, text)
    which = "(spo and not gspo) or median or configured"
    command = [sys.executable, "-m", "pytest", "-vv", "-m", "slow or not slow", "-p", "no:cacheprovider", "-k", which, "tests"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for test in (
        "test_value_and_gradient_are_those_of_the_papers_formula[spo-0] PASSED",
        "test_median_takes_off_the_middle_of_the_group[0] PASSED",
        "test_a_preset_trains[spo] PASSED",
        "test_a_preset_trains[median_grpo] PASSED",
    ):
        assert test in done.stdout


def edit(folder: Path, where: str, text: str) -> None:
    """Put a block above or below the first line that starts as its heading says."""
    file, _, place = where.partition(", ")
    side, _, anchor = place.partition(": ")
    lines = (folder / file).read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.strip().startswith(anchor))
    is_definition = text.startswith(("def ", "class ", "@"))
    lines.insert(at if side == "above" else at + 1, text + ("\n\n" if is_definition else ""))
    (folder / file).write_text("".join(lines))
