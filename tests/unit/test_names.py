"""One name, one class: who searches for a class finds one."""

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import pytest

import reroll.config
import reroll_zoo
from reroll.config.base import Node
from reroll.config.registry import kinds

ROOT, ZOO = Path(reroll.__file__).parent, Path(reroll_zoo.__file__).parent


def classes_by_name(*roots: Path) -> dict[str, list[str]]:
    """Where each class is; private ones under their name without the underscore."""
    found = defaultdict(list)
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    return found


def test_no_name_is_given_to_two_classes() -> None:
    twice = {name: places for name, places in classes_by_name(ROOT, ZOO).items() if len(places) > 1}
    assert not twice, f"give one of each another name; a config node ends in Config: {twice}"


def test_the_glossary_names_classes_where_they_are() -> None:
    """Each `ClassName`, `path.py` of docs/glossary.md, in this order, is a class of that file, below reroll/ or reroll_zoo/…"""
    text = (ROOT.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = classes_by_name(ROOT, ZOO)
    entries = [words for words in re.findall(r"\(([^()]*\.py`[^()]*)\)", text) if "`" in words]
    assert len(entries) > 30
    for entry in entries:
        names: list[str] = []
        for word in re.findall(r"`([^`]+)`", entry):
            if not word.endswith(".py"):
                names.append(word)
                continue
            file = (ROOT.parent if word.startswith("reroll_zoo/") else ROOT) / word
            assert file.is_file(), word
            for name in names:
                assert any(place.startswith(f"{file}:") for place in found[name]), f"{name} is not in {word}"
            names = []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/glossary.md"])
def test_lines_fit_a_screen(page: str) -> None:
    lines = (ROOT.parent / page).read_text(encoding="utf-8").splitlines()
    assert not [f"{page}:{number}" for number, line in enumerate(lines, 1) if len(line) > 120]


def test_the_nodes_of_a_config_end_in_config() -> None:
    for module in pkgutil.iter_modules(reroll.config.__path__, "reroll.config."):
        importlib.import_module(module.name)
    groups = "envs rewards data strategies engines runtimes curricula agents advantages losses divergences clusters"
    for group in groups.split():
        assert kinds(f"reroll.{group}")  # Their modules are imported, and so are the nodes that they are made of.
    ours = [node for node in nodes_below(Node) if node.__module__.partition(".")[0] in ("reroll", "reroll_zoo")]
    assert len(ours) > 150
    assert not [f"{node.__module__}:{node.__name__}" for node in ours if not node.__name__.endswith("Config")]


def nodes_below(node: type[Node]) -> set[type[Node]]:
    return {found for below in node.__subclasses__() for found in (below, *nodes_below(below))}


def test_the_core_is_read_in_a_day() -> None:
    """At most 25,000 lines: what is optional goes to the zoo, behind a seam (docs/write-a-plug-in.md)."""
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.rglob("*.py")) <= 25_000
