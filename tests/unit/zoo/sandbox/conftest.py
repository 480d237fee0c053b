"""A sandbox of each level that this machine gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Language, Limits, Program, Ran
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.local import LEVELS, LocalPool

QUICK = Limits(cpu_s=10, wall_s=60, memory_mb=256, processes=8, file_mb=4, output_kb=64)
"""Little of everything but time, which runs out for what hangs alone."""


class Box:
    """A pool with one place, and the event loop that it lives in."""

    def __init__(self, level: str) -> None:
        self._runner = asyncio.Runner()
        self.pool = LocalPool(LocalSandboxConfig.model_validate({"level": level}), num_processes=1)
        self.level = level

    def run(self, source: str, *, stdin: str = "", language: Language = "python", limits: Limits = QUICK) -> Ran:
        return self._runner.run(self.pool.run(Program(source=source, stdin=stdin, language=language, limits=limits)))

    def close(self) -> None:
        self._runner.run(self.pool.close())
        self._runner.close()


@pytest.fixture(scope="module", params=LEVELS)
def any_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    try:
        box = Box(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    yield box
    box.close()


@pytest.fixture
def box(any_box: Box) -> Iterator[Box]:
    """A box in which, whatever the test did, the next program runs normally and alone."""
    yield any_box
    ran = any_box.run("import os; print(os.listdir('.'), input())", stdin="as ever")
    assert (ran.status, ran.stdout, ran.stderr) == ("ok", "[] as ever\n", "")
