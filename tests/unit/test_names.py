"""One name, one class: who searches for a class finds one."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import reroll
import reroll_zoo

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
