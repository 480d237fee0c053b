"""What is written from the code is as the code has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # scripts, no package

from make_reference import FILES, config_page

from reroll_zoo.reference.reference import all_paths


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_committed_file_is_what_the_code_gives(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path](), "it is older than the code: make reference"


def test_every_field_stands_on_the_page_and_every_link_leads_somewhere() -> None:
    page = config_page()
    for path in all_paths():
        name = path.rpartition(".")[2]
        assert name == "kind" or f"| `{name}`" in page, path
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert len(headings) == len(set(headings))
    assert set(re.findall(r"\(#(.+?)\)", page)) <= anchors
