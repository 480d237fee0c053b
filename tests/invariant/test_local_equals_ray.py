"""The same config gives the same curve in threads of this process and in Ray actors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.errors import WorkerDied
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train

ray = pytest.importorskip("ray")


def run(tree: dict[str, Any], *, name: str, runtime: str, resume: bool = False) -> Outcome:
    tree["run"]["name"] = name
    tree["runtime"] = {"kind": runtime}
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), resume=resume, code_folder=folder)


def curve(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Any:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_local_and_ray_give_the_same_curve_and_the_same_weights(rlvr_tree: dict[str, Any]) -> None:
    local, remote = run(rlvr_tree, name="local", runtime="local"), run(rlvr_tree, name="ray", runtime="ray")
    assert curve(local) == pytest.approx(curve(remote), abs=1e-6)
    mine, other = (AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (local, remote))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


def test_a_killed_ray_actor_ends_the_run_clearly_and_the_run_can_be_resumed(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["checkpoint"] = {"every": 1}
    whole = run(rlvr_tree, name="whole", runtime="local")
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": "killer:kill_actors_once"}}
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    (folder / "killer.py").write_text(KILLER.format(flag=str(folder / "killed"), signal=int(signal.SIGKILL)))
    with pytest.raises(WorkerDied, match="--resume"):
        run(rlvr_tree, name="killed", runtime="ray")
    assert (folder / "killed").exists()
    resumed = run(rlvr_tree, name="killed", runtime="ray", resume=True)
    assert curve(resumed) == pytest.approx(curve(whole), abs=1e-6)


KILLER = '''
import os
import pathlib

from reroll_test_rewards import has_digit

count = 0


def title(pid):
    try:
        return pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid):
    try:
        return int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def kill_actors_once(prompt, trajectory):
    """After the first step, kill every actor of this run's Ray but the one this reward runs under."""
    global count
    count += 1
    flag = pathlib.Path({flag!r})
    if count > 16 and not flag.exists():
        flag.touch()
        mine = os.getpid()
        while not title(mine).startswith(b"ray::_Actor"):
            mine = parent(mine)
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and title(entry.name).startswith(b"ray::_Actor") and parent(entry.name) == parent(mine):
                if int(entry.name) != mine:
                    os.kill(int(entry.name), {signal})
    return has_digit(prompt, trajectory)
'''
