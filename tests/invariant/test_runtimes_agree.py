"""The same config gives the same curve in threads of this process, in processes of their own and in Ray actors."""

from __future__ import annotations

import json
import os
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


@pytest.fixture(scope="module")
def one_ray() -> Any:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(params=["processes", "ray"])
def apart(request: pytest.FixtureRequest) -> str:
    """The kind of a runtime whose workers are processes."""
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    return request.param


TWO_RANKS = {"kind": "fsdp2", "num_ranks": 2}


@pytest.mark.parametrize(
    ("apart", "ranks"),
    [
        pytest.param("processes", TWO_RANKS, id="processes-fsdp2"),
        # A run on Ray is held to the curve and the weights of the local one in tests/ray/test_device_maps.py.
        pytest.param("ray", {}, id="ray-torch", marks=pytest.mark.slow),
        pytest.param("processes", {}, id="processes-torch", marks=pytest.mark.slow),
        pytest.param("ray", TWO_RANKS, id="ray-fsdp2", marks=pytest.mark.slow),
    ],
    indirect=["apart"],
)
def test_all_runtimes_give_the_same_curve_and_the_same_weights(
    rlvr_tree: dict[str, Any], apart: str, ranks: dict[str, Any]
) -> None:
    local = run(rlvr_tree, name="local", runtime="local")
    rlvr_tree["policy"]["strategy"] = ranks
    remote = run(rlvr_tree, name=apart, runtime=apart)
    assert curve(local) == pytest.approx(curve(remote), abs=1e-6)
    mine, other = (AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (local, remote))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart", ["processes", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_killed_worker_ends_the_run_clearly_and_the_run_can_be_resumed(rlvr_tree: dict[str, Any], apart: str) -> None:
    rlvr_tree["checkpoint"] = {"every": 1}
    rlvr_tree["run"]["restarts"] = 0
    whole = run(rlvr_tree, name="whole", runtime="local")
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": "killer:kill_workers_once"}}
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    (folder / "killer.py").write_text(
        KILLER.format(flag=str(folder / "killed"), controller=os.getpid(), signal=int(signal.SIGKILL))
    )
    with pytest.raises(WorkerDied, match="--resume"):
        run(rlvr_tree, name="killed", runtime=apart)
    assert (folder / "killed").exists()
    resumed = run(rlvr_tree, name="killed", runtime=apart, resume=True)
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


def is_worker(pid):
    return title(pid).startswith(b"ray::_Actor") or b"reroll.runtime.process_worker" in title(pid)


def parent(pid):
    try:
        return int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def above(pid):
    """The controller is one of these: a worker may be a fork of a process that it has started."""
    return parent(pid), parent(parent(pid))


def kill_workers_once(prompt, trajectory):
    """After the first step, kill every worker of this run but the one this reward runs under."""
    global count
    count += 1
    flag = pathlib.Path({flag!r})
    if count > 16 and not flag.exists():
        flag.touch()
        mine = os.getpid()
        while not is_worker(mine):
            mine = parent(mine)
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and is_worker(entry.name) and {controller} in above(entry.name):
                if int(entry.name) != mine:
                    os.kill(int(entry.name), {signal})
    return has_digit(prompt, trajectory)
'''
