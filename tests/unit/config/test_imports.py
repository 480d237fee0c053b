"""Where modules that a config names are looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reroll.config.imports import search_in


def test_the_project_at_hand_comes_before_those_that_were_used_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    one, other = tmp_path / "one", tmp_path / "other"
    search_in([one])
    search_in([other])
    search_in([one, other, one])
    assert sys.path[:2] == [str(one), str(other)]
    assert (sys.path.count(str(one)), sys.path.count(str(other))) == (1, 1)
