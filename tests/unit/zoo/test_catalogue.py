"""Every metric is written down, and what is written down can be found."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import reroll
from reroll_zoo.reference.catalogue import CATALOGUE, doc_of

PACKAGE = Path(reroll.__file__).parent
DOCS = [doc for docs in CATALOGUE.values() for doc in docs]
FAMILIES = {doc.name.partition("/")[0] for doc in DOCS if "/" in doc.name}


def names_in(file: Path) -> Iterator[str]:
    """Strings of a module that look like the name of a metric. What is filled in is known where it is a whole part: `…`."""
    tree = ast.parse(file.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        family, *parts = text.split("/")
        is_whole = all(part == "…" or (part and "…" not in part) for part in parts)
        if family in FAMILIES and parts and parts != ["…"] and is_whole and " " not in text:
            yield text


def test_no_name_stands_twice() -> None:
    names = [doc.name for doc in DOCS]
    assert len(names) == len(set(names))


def test_a_name_of_its_own_is_found_before_a_pattern() -> None:
    assert (found := doc_of("env/lake/valid")) is not None
    assert found.name == "env/<domain>/valid"
    assert (found := doc_of("reward/mean")) is not None
    assert found.name == "reward/mean"
    assert (found := doc_of("eval/pass@8")) is not None
    assert found.name == "eval/pass@<k>"
    assert doc_of("train/los") is None
    assert doc_of("eval/los") is None


@pytest.mark.parametrize(
    "file",
    ["reroll/observe/progress.py", "reroll_zoo/live_view/panel.py", "reroll_zoo/show/curve.py", "reroll_zoo/show/report.py"],
)
def test_what_the_live_view_the_curve_and_the_report_show_is_in_the_catalogue(file: str) -> None:
    names = set(names_in(PACKAGE.parent / file))
    assert len(names) > 4
    assert {name for name in names if doc_of(name) is None} == set()


def test_names_that_the_code_spells_out_are_in_the_catalogue() -> None:
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "reroll_zoo").rglob("*.py")]
    found = {name: str(file) for file in files for name in names_in(file) if file.name != "catalogue.py"}
    assert len(found) > 60
    assert {name: file for name, file in found.items() if doc_of(name) is None} == {}
