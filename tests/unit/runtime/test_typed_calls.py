"""The promise of the unbound method: a type checker sees a wrong remote call before it is made."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

SNIPPET = """
from reroll.runtime.base import Placement, Runtime, WorkerInfo

class Worker:
    def __init__(self, info: WorkerInfo, size: int) -> None: ...
    def train(self, shard: list[int]) -> float: return 0.0
    def save(self, path: str, *, step: int) -> str: return path

async def use(runtime: Runtime) -> None:
    workers = await runtime.spawn(Worker, Placement("policy", ("cpu",)), 3)
    good: list[float] = await workers.scatter(Worker.train, [[1], [2]])
    fine: list[str] = await workers.broadcast(Worker.save, "here", step=1)
    last: str = await workers.one(0, Worker.save, "here", step=1)
    await workers.scatter(Worker.train, ["text"])  # wrong shard
    await workers.broadcast(Worker.save, 7, step=1)  # wrong argument
    await workers.broadcast(Worker.save, "here", stpe=1)  # misspelt argument
    await workers.broadcast(Worker.svae, "here", step=1)  # misspelt method
    await workers.one(0, Worker.save, "here")  # missing argument
    number: int = await workers.one(0, Worker.save, "here", step=1)  # wrong result
    await runtime.spawn(Worker, Placement("policy", ("cpu",)), "three")  # wrong constructor argument
"""


def test_a_type_checker_rejects_every_wrong_call_and_no_right_one(tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    config = tmp_path / "mypy.ini"  # What the runtimes are about is looked at, not all that the library imports.
    config.write_text("[mypy]\nfollow_imports = skip\n[mypy-reroll.runtime.*]\nfollow_imports = silent\n")
    report, problems, _ = api.run([str(path), f"--config-file={config}", f"--cache-dir={tmp_path / 'cache'}"])
    assert problems == ""
    rejected = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", report)}
    wrong = {number for number, line in enumerate(SNIPPET.splitlines(), start=1) if "# wrong" in line or "# mis" in line}
    assert rejected == wrong, report
