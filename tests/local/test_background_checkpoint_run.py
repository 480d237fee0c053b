"""Whole runs whose checkpoints are written in the background: killed, interrupted, or with a disk that fills up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from warm import WarmProcess

from reroll.config.load import parse_config
from reroll.errors import RunFolderError
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder, **options)


def run_folder(tree: dict[str, Any]) -> Path:
    return Path(tree["run"]["runs_dir"]) / str(tree["run"]["name"])


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(folder: Path) -> list[float]:
    return [row["reward/mean"] for row in metrics(folder) if "reward/mean" in row]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_same(ours: Outcome, expected: Outcome) -> None:
    assert curve(ours.folder) == curve(expected.folder)
    weights = [AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (ours, expected)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


KILLED_WHILE_IT_WRITES = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from reroll.config.load import parse_config
from reroll.pipeline.run import train

tree = json.loads(Path(sys.argv[1]).read_text())
folder = Path(tree["run"]["runs_dir"])
write = torch.save

def write_half_and_die(state, stream):
    write(state, stream)
    if "000002" in stream.name:
        return
    stream.truncate(stream.tell() - 1000)
    while (folder / "killed" / "metrics.jsonl").read_text().count("reward/mean") < 5:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = write_half_and_die
train(parse_config(tree, folder=folder.parent), code_folder=folder.parent)
"""


def test_a_run_killed_while_a_checkpoint_is_written_resumes_from_the_one_before_to_the_same_end(
    rlvr_tree: dict[str, Any], tmp_path: Path
) -> None:
    rlvr_tree["run"]["steps"] = 6
    rlvr_tree["checkpoint"] = {"every": 2}
    rlvr_tree["data"]["eval"] = []
    whole = run(rlvr_tree)
    rlvr_tree["run"]["name"] = "killed"
    (tmp_path / "tree.json").write_text(json.dumps(rlvr_tree))
    assert WarmProcess(KILLED_WHILE_IT_WRITES, str(tmp_path / "tree.json")).wait() == -signal.SIGKILL
    folder = run_folder(rlvr_tree)
    assert names(folder) == [".unfinished-000004", "step-000002"]
    assert len(curve(folder)) >= 5  # It went on while it wrote.
    assert_same(run(rlvr_tree, resume=True), whole)
    assert names(folder) == ["step-000004", "step-000006"]


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[None]:
    """Put what is in a folder on a disk of this size."""
    aside = shutil.move(folder, folder.with_name("aside"))
    folder.mkdir()
    size = f"size={num_bytes}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_ends_the_run_with_the_path_and_the_fix_and_it_can_go_on(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["checkpoint"] = {"every": 1}
    whole = run(rlvr_tree)
    rlvr_tree["run"] |= {"name": "full", "steps": 1}
    first = run(rlvr_tree)
    rlvr_tree["run"]["steps"] = 3
    size = sum(path.stat().st_size for path in first.checkpoint.rglob("*"))
    with small_disk(first.checkpoint.parent, num_bytes=size + size // 2):
        with pytest.raises(RunFolderError, match=r"cannot write .*checkpoints/step-000002: No space left .*free some space"):
            run(rlvr_tree, resume=True)
        assert names(first.folder) == ["step-000001"]
        subprocess.run(["mount", "-o", f"remount,size={8 * size}", str(first.checkpoint.parent)], check=True)
        assert_same(run(rlvr_tree, resume=True), whole)


def test_an_interrupted_run_waits_for_its_checkpoint_and_takes_none_twice(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["run"]["steps"] = 10_000
    rlvr_tree["checkpoint"] = {"every": 1}
    folder = run_folder(rlvr_tree)

    def interrupt_after_three_steps() -> None:
        while len(curve(folder)) < 3:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_after_three_steps)
    thread.start()
    outcome = run(rlvr_tree)
    thread.join()
    assert outcome.interrupted
    assert names(folder)[-1] == f"step-{outcome.num_steps:06d}" == outcome.checkpoint.name
    times = Counter(row["step"] for row in metrics(folder) if "time/checkpoint_s" in row and "time/checkpoint_wait_s" in row)
    assert times == dict.fromkeys(range(1, outcome.num_steps + 1), 1)
