"""The Dockerfile names what there is: files that its context holds, extras, commands and modules."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    """With each instruction on a line of its own."""
    return (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def test_what_is_copied_exists_and_is_let_into_the_context(dockerfile: str) -> None:
    copied = [name for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]]
    everything, *let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert everything == "*", "what the context holds is what is listed, and nothing else"
    assert {"pyproject.toml", "reroll", "reroll_zoo"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_in, name


def test_what_is_needed_to_build_the_package_is_copied_before_it(dockerfile: str, project: dict[str, Any]) -> None:
    first_layer = dockerfile.partition("RUN pip install --no-cache-dir --no-deps")[0]
    for name in (project["readme"], *project["license-files"]):
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", first_layer, re.MULTILINE), name


def test_the_extras_that_are_installed_exist(dockerfile: str, project: dict[str, Any]) -> None:
    named = [extra for extras in re.findall(r"'\.\[([\w,-]+)\]'", dockerfile) for extra in extras.split(",")]
    assert named
    assert set(named) <= set(project["optional-dependencies"])


def test_its_python_its_command_and_the_module_that_it_tells_of_are_the_projects(
    dockerfile: str, project: dict[str, Any]
) -> None:
    minors = re.findall(r"^ARG PYTHON=3\.(\d+)$", dockerfile, re.MULTILINE)
    lowest, highest = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    assert [lowest <= int(minor) < highest for minor in minors] == [True]
    (command,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', dockerfile, re.MULTILINE)
    assert command in project["scripts"]
    (module,) = re.findall(r" -m ([\w.]+)", dockerfile)
    assert find_spec(f"{module}.__main__")
