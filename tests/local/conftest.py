"""What keeps hundreds of whole runs short."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll.pipeline import preflight
from reroll.pipeline.rehearsal import FIX, code_problems


@pytest.fixture(autouse=True)
def _user_code_is_tried_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Not in one that starts for it, as every training does: tests/unit/pipeline/test_preflight.py is about that one."""

    def violations(config: RlvrConfig) -> Iterator[Violation]:
        for where, problem in code_problems(config).items():
            yield Violation(where, problem, FIX)

    monkeypatch.setattr(preflight, "code_violations", violations)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]  # The user's: another test has others of the same name.
