"""What keeps hundreds of whole runs short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reroll.config.pipeline import PipelineConfig
from reroll.errors import Violation
from reroll_zoo import rehearsal
from reroll_zoo.rehearsal import FIX, code_problems
from reroll_zoo.show import curve


@pytest.fixture
def pictures() -> None:
    """The runs of a test that asks for this draw their curves."""


@pytest.fixture(autouse=True)
def _no_curve_is_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take as long as the training: tests/unit/zoo/test_curve.py is about it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(curve, "draw_curve", lambda *_, **__: False)


@pytest.fixture(autouse=True)
def _user_code_is_tried_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Not in one that starts for it, as every training does: tests/unit/pipeline/test_preflight.py is about that one."""

    def violations(config: PipelineConfig, *, opens: bool) -> Iterator[Violation]:
        for where, problem in code_problems(config, opens=opens).items():
            yield Violation(where, problem, FIX)

    monkeypatch.setattr(rehearsal, "code_violations", violations)
    before, loaded = list(sys.path), {*sys.modules}
    yield
    folders = {*sys.path} - {*before}
    sys.path[:] = before
    for name in {*sys.modules} - loaded:  # Those alone: thousands were there before.
        file = str(getattr(sys.modules[name], "__file__", None))
        if file.startswith(str(tmp_path_factory.getbasetemp())) or str(Path(file).parent) in folders:
            del sys.modules[name]  # The user's, or an example's: another test has others of the same name.
