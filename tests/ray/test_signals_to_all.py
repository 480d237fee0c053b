"""Signals that a batch system sends to every process of a run at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))

    def below(parent: int) -> Iterator[int]:
        for child in children.get(parent, ()):
            yield child
            yield from below(child)

    return list(below(pid))


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until_gone(pids: list[int], *, budget_s: float) -> None:
    deadline_s = time.monotonic() + budget_s
    while left := [name_of(pid) for pid in pids if name_of(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


WORKERS = {"processes": "reroll.runtime.process_worker", "ray": "ray::_Actor"}
"""What the processes of workers are called, by runtime."""


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def started(rlvr_tree: dict[str, Any], tmp_path: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in processes or on a Ray of its own that has finished a step."""
    rlvr_tree["run"]["steps"] = 100_000
    rlvr_tree["runtime"] = {"kind": kind}
    rlvr_tree["data"]["eval"] = []
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))
    run = subprocess.Popen(
        [sys.executable, "-m", "reroll", "train", "run.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = tmp_path / "runs" / "test"
    try:
        while not (folder / "metrics.jsonl").exists() or "reward" not in (folder / "metrics.jsonl").read_text():
            assert run.poll() is None
            time.sleep(0.1)
        yield run, folder
    finally:
        signal_all([*descendants(run.pid), run.pid], signal.SIGKILL)
        run.communicate()


def test_a_sigterm_to_every_process_saves_and_ends_all_of_them(started: tuple[subprocess.Popen[str], Path], kind: str) -> None:
    run, folder = started
    everybody = [*descendants(run.pid), run.pid]
    assert sum(WORKERS[kind] in name_of(pid) for pid in everybody) >= 2
    signal_all(everybody, signal.SIGTERM)
    said, _ = run.communicate(timeout=120)
    assert "stopped" in said
    assert run.returncode == 130
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert Path(result["checkpoint"]).name == f"step-{result['steps']:06d}"
    wait_until_gone(everybody, budget_s=120)


@pytest.mark.parametrize("kind", ["processes", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_controller_and_workers_end_with_the_process_that_is_killed(
    started: tuple[subprocess.Popen[str], Path], kind: str
) -> None:
    run, _ = started
    ours = [pid for pid in descendants(run.pid) if WORKERS[kind] in name_of(pid) or "reroll train" in name_of(pid)]
    assert len(ours) >= 3
    run.kill()
    wait_until_gone(ours, budget_s=120)
