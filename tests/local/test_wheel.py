"""The wheel that `python -m build` makes holds everything: installed by itself, it trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("reroll", "reroll_zoo")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a folder behind where it builds."""
    source, out = tmp_path_factory.mktemp("source") / "reroll", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)], cwd=out)
    return next(out.glob("reroll-*.whl"))


@pytest.fixture(scope="module")
def scratch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with that wheel alone. The packages that it needs are lent by this one; reroll's sources are not."""
    folder = tmp_path_factory.mktemp("scratch") / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder.parent)
    python = folder / "bin" / "python"
    _run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], cwd=folder.parent)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.partition("/")[0] in PACKAGES}
    assert packed == files


def test_an_installed_wheel_trains_what_it_starts(scratch: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert _run([str(scratch / "reroll"), "--version"], cwd=tmp_path).startswith("reroll ")
    where = _run([str(scratch / "python"), "-c", "import reroll; print(reroll.__file__)"], cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(scratch.parent)
    _run([str(scratch / "reroll"), "init", "project"], cwd=tmp_path)
    small = ["run.steps=1", "rollout.group_size=2", "rollout.prompts_per_step=2", "data.eval=[]", "eval.every=0"]
    command = ["train", "config.yaml", f"policy.model={tiny_model}", "policy.strategy.precision=fp32", *small]
    _run([str(scratch / "reroll"), *command], cwd=tmp_path / "project")
    _run([str(scratch / "reroll"), "show", "runs/project", "--page"], cwd=tmp_path / "project")
    assert (tmp_path / "project/runs/project/report.html").is_file()


def _run(command: list[str], *, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
