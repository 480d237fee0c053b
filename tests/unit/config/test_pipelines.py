"""A pipeline is found by its config class, an entry point: reroll's own, and those of a package that is merely on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reroll.config.pipeline import pipelines
from reroll.pipeline.base import Pipeline
from reroll.pipeline.run import pipeline_of

PLUG_IN = """
from typing import ClassVar, Literal
from reroll import SftConfig

class EchoConfig(SftConfig):
    '''Say it again.'''
    runs: ClassVar[str] = "echo:EchoPipeline"
    pipeline: Literal["echo"]
    times: int = 2
"""
ENTRIES = "[reroll.pipelines]\necho = echo:EchoConfig\ngone = no_such_module:Gone\nstrange = json:JSONDecoder\n"
ASK = """
import json, sys
from reroll.config.load import parse_config
from reroll.errors import ConfigError
try:
    config = parse_config(json.loads(sys.argv[1]), runs_here=False)
    print(type(config).__name__, config.times, config.runs, config.summary)
except ConfigError as error:
    print(*(f"{found.path}: {found.problem} -> {found.fix}" for found in error.violations), sep="; ")
print([name for name in ("torch", "ray") if name in sys.modules])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package as pip leaves it."""
    (tmp_path / "echo.py").write_text(PLUG_IN)
    folder = tmp_path / "echo-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    return tmp_path


def ask(package: Path, pipeline: str, **fields: Any) -> str:
    """What comes of a config where the package is on the path."""
    tree = {"pipeline": pipeline, "policy": {"model": "m"}, "data": {"train": [{"kind": "jsonl", "path": "x"}]}, **fields}
    env = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run([sys.executable, "-c", ASK, json.dumps(tree)], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_package_adds_a_pipeline_and_reading_its_config_loads_no_torch(package: Path) -> None:
    said = ask(package, "echo", times=3, run={"steps": 5})
    assert said.splitlines() == ["EchoConfig 3 echo:EchoPipeline echo of m, 5 steps of 32 rows", "[]"]


def test_a_pipeline_that_cannot_be_used_says_why_and_an_unknown_one_what_there_is(package: Path) -> None:
    assert "gone is no_such_module:Gone (package echo), which cannot be imported" in ask(package, "gone")
    assert "name a config class derived from PipelineConfig" in ask(package, "strange")
    assert "set pipeline to one of: rlvr, agentic, sft, dpo, reward_model, distill, echo" in ask(package, "ppo")


def test_every_pipeline_names_what_runs_it() -> None:
    for name, root in pipelines().items():
        found = pipeline_of(root.model_construct(pipeline=name, recorded=None))
        assert issubclass(found, Pipeline), name
        assert found.config_class is root, name
