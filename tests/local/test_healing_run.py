"""Runs that lose a process they cannot do without, and go on by themselves to the end of the undisturbed run, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.errors import WorkerDied
from reroll.observe.files import read_jsonl
from reroll.observe.journal import BEGUN, read_journal
from reroll.pipeline import restarts
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.training.cluster import TrainCluster
from reroll_zoo.audit.audit import audit
from reroll_zoo.forks.forks import children, command
from reroll_zoo.replicas.place import place_of
from reroll_zoo.replicas.replicas import MemoryReplicas
from reroll_zoo.supervisor import SPARE

Tree = dict[str, Any]
NUM_STEPS = 4
SPARE_AT_ONCE = """
from reroll_zoo import supervisor

class OneSpare(supervisor._Spare):
    def __init__(self):
        supervisor.SPARE_AFTER_S = supervisor.SPARE_AGAIN_AFTER_S = 600  # Another would load torch in vain.
        super().__init__()

supervisor.SPARE_AFTER_S, supervisor._Spare = 0, OneSpare
from reroll.cli import main
main()
"""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_S", 0.01)


@pytest.fixture
def tree(rlvr_tree: Tree) -> Tree:
    return configured(rlvr_tree)


@pytest.fixture(scope="module")
def whole(module_rlvr_tree: Tree) -> Outcome:
    """What comes of `tree` when nothing happens."""
    return run(configured(module_rlvr_tree))


def configured(tree: Tree) -> Tree:
    tree["data"]["eval"] = []
    tree["run"]["steps"] = NUM_STEPS
    tree["checkpoint"] = {"every": 2}
    return tree


def run(tree: Tree, **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(copy.deepcopy(tree), folder=folder), code_folder=folder, **options)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [row for row in (read_jsonl(path) if path.exists() else []) if "reward/mean" in row]


def assert_same(folder: Path, expected: Outcome) -> None:
    """The same rewards and weights, and nothing lost or trained twice."""
    assert [row["reward/mean"] for row in rows(folder)] == [row["reward/mean"] for row in rows(expected.folder)]
    last = folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (last, expected.checkpoint))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert audit(folder / "journal", max_staleness=0).violations == []


def attempts(folder: Path) -> list[int]:
    return [event.detail["attempt"] for event in read_journal(folder / "journal") if event.state == BEGUN]


KILLER = '''
import os, pathlib, signal
from reroll_test_rewards import has_digit

FLAG, VICTIM, AFTER = pathlib.Path({flag!r}), {victim!r}, {after}
count = 0

def score(prompt, trajectory):
    """Kill a worker of this run, once, after so many verdicts."""
    global count
    count += 1
    if count > AFTER and not FLAG.exists():
        FLAG.touch()
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    title = (entry / "cmdline").read_bytes().split(b"\\0")
                    above = above_of(entry.name)
                except OSError:
                    continue
                if VICTIM in title and above & above_of(os.getpid()):
                    os.kill(int(entry.name), signal.SIGKILL)
    return has_digit(prompt, trajectory)

def above_of(pid):
    """A worker may be a fork of a process beside the controller."""
    return {{parent_of(pid), parent_of(parent_of(pid))}}

def parent_of(pid):
    return int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
'''


def killing(tree: Tree, victim: str, *, after: int) -> None:
    folder = Path(tree["run"]["runs_dir"]).parent
    flag = folder / "killed"
    (folder / "killer.py").write_text(KILLER.format(flag=str(flag), victim=victim.encode(), after=after))
    tree["rewards"] = {"default": {"kind": "import", "path": "killer:score"}}


@pytest.mark.parametrize("victim", ["policy[0]", pytest.param("engine[0]", marks=pytest.mark.slow)])
def test_a_run_that_loses_its_trainer_or_its_last_engine_goes_on_to_the_same_end(
    tree: Tree, whole: Outcome, victim: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tree |= {"runtime": {"kind": "processes"}}
    killing(tree, victim, after=3 * 16 - 8)  # In the third step: the checkpoint of the second stands.
    outcome = run(tree)
    what = f"worker {victim} is gone: its process died (SIGKILL)"
    assert f"restart 1: {what}" in capsys.readouterr().out
    assert f"{what}: the run goes on by itself" in caplog.text
    assert outcome.restarts == 1
    assert json.loads((outcome.folder / "result.json").read_text())["restarts"] == 1
    assert rows(outcome.folder)[-1]["run/restarts"] == 1
    assert attempts(outcome.folder) == [1, 2]
    assert_same(outcome.folder, whole)


def test_a_run_that_has_written_no_checkpoint_goes_on_from_its_replica(
    tree: Tree, whole: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def take_and_write(self: MemoryReplicas, *args: Any, _take: Any = MemoryReplicas.take_if_due) -> None:
        await _take(self, *args)
        await self.finish()

    monkeypatch.setattr(MemoryReplicas, "take_if_due", take_and_write)
    tree |= {"runtime": {"kind": "processes"}, "checkpoint": {"every": 0, "replica_share": 1.0}}
    killing(tree, "policy[0]", after=3 * 16 - 8)
    outcome = run(tree)
    folder = outcome.folder.resolve()
    place = place_of(folder, owner=os.getpid())
    assert f"resumed from {place}/checkpoints/step-00000" in capsys.readouterr().out
    begun = [event.detail["version"] for event in read_journal(folder / "journal") if event.state == BEGUN]
    assert begun[0] == 0 < begun[1]
    assert not place.exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{NUM_STEPS:06d}"]
    assert_same(folder, whole)


def test_a_run_that_loses_a_worker_at_the_same_step_again_and_again_ends(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose_it_in_the_third_step(self: TrainCluster, *args: Any, _train: Any = TrainCluster.train, **kwargs: Any) -> Any:
        if kwargs["seed"] == 2:
            raise WorkerDied("worker policy[0] is gone: its process died (SIGKILL). Free memory.")
        return await _train(self, *args, **kwargs)

    monkeypatch.setattr(TrainCluster, "train", lose_it_in_the_third_step)
    tree["run"]["restarts"] = 2
    with pytest.raises(WorkerDied, match=r"policy\[0\] is gone"):
        run(tree)
    folder = Path(tree["run"]["runs_dir"]) / "test"
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["restarts"]) == ("failed", 2)
    assert attempts(folder) == [1, 2, 3]


@pytest.fixture
def started(tree: Tree, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`reroll train` as a user types it, in a process group of its own; with `has_spare` there is a spare from the start."""
    made: list[subprocess.Popen[str]] = []

    def start(*, has_spare: bool = False) -> subprocess.Popen[str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, *(["-c", SPARE_AT_ONCE] if has_spare else ["-m", "reroll"]), "train", "run.yaml"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        made.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes))
        return made[-1]

    yield start
    for process in made:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The controller, then its spare."""
    return children(process.pid)


def fork_servers(pid: int) -> list[int]:
    """What its workers are forked from."""
    return [child for child in children(pid) if "reroll_zoo.forks.server" in command(child)]


def is_spare(pid: int) -> bool:
    """One that lives: what has ended and still has a number has no command."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == SPARE and Path(f"/proc/{pid}/cmdline").read_text() != ""
    except OSError:
        return False


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


WAITER = '''
import pathlib, time
from reroll_test_rewards import has_digit

count = 0

def score(prompt, trajectory):
    """From the third step on, wait until the test is ready."""
    global count
    count += 1
    while count > 32 and not pathlib.Path({flag!r}).exists():
        time.sleep(0.02)
    return has_digit(prompt, trajectory)
'''


@pytest.mark.parametrize(
    "has_spare", [pytest.param(True, id="spare"), pytest.param(False, id="no spare", marks=pytest.mark.slow)]
)
def test_a_killed_controller_is_followed_by_the_spare_if_there_is_one_and_goes_on_from_its_replica_to_the_same_end(
    tree: Tree, tmp_path: Path, whole: Outcome, started: Callable[..., subprocess.Popen[str]], has_spare: bool
) -> None:
    folder = tmp_path / "runs" / "test"
    (tmp_path / "waiter.py").write_text(WAITER.format(flag=str(tmp_path / "go")))
    tree["rewards"] = {"default": {"kind": "import", "path": "waiter:score", "timeout_s": 600}}
    tree["runtime"] = {"kind": "processes"}
    tree["checkpoint"] = {"every": 0, "replica_share": 1.0}
    process = started(has_spare=True)
    place = place_of(folder, owner=process.pid)
    until(lambda: list(place.glob("checkpoints/step-*")), process)
    controller = children_of(process)[0]
    until(lambda: is_spare(children_of(process)[-1]), process)
    spare = children_of(process)[-1]
    until(lambda: len(fork_servers(spare)) == 2, process)
    servers = fork_servers(spare)
    (tmp_path / "go").touch()
    os.kill(spare, signal.SIGSTOP if has_spare else signal.SIGKILL)  # One that was stopped is woken when it is called.
    if not has_spare:
        until(lambda: not is_spare(spare), process)
    os.kill(controller, signal.SIGKILL)
    until(lambda: len(rows(folder)) == NUM_STEPS, process)
    if has_spare:
        assert children_of(process)[0] == spare
        assert fork_servers(spare) == servers  # Its workers came from what was there before.
    else:
        assert spare not in children_of(process)
    said, _ = process.communicate()
    assert f"resumed from {place}/checkpoints/step-00000" in said
    assert not place.exists()
    assert "the controller was killed (SIGKILL): the run goes on by itself" in said
    assert process.returncode == 0
    assert json.loads((folder / "result.json").read_text())["restarts"] == 1
    assert attempts(folder) == [1, 2]
    assert_same(folder, whole)


@pytest.mark.parametrize("to_all", [pytest.param(True, id="to both"), pytest.param(False, id="to one", marks=pytest.mark.slow)])
def test_one_ctrl_c_saves_and_leaves_whether_a_terminal_sends_it_to_both_processes_or_kill_to_the_one_that_waits(
    tree: Tree, tmp_path: Path, started: Callable[..., subprocess.Popen[str]], to_all: bool
) -> None:
    tree["run"]["steps"] = 100_000
    process = started()
    until(lambda: rows(tmp_path / "runs" / "test"), process)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    said, _ = process.communicate()
    assert "saved in" in said
    assert process.returncode == 130
    result = json.loads((tmp_path / "runs" / "test" / "result.json").read_text())
    assert result["status"] == "interrupted"


def test_a_controller_that_ends_by_an_error_is_not_started_anew(
    tree: Tree, tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    tree["rewards"]["default"]["path"] = "reroll_test_rewards:always_raises"
    process = started()
    said, _ = process.communicate()
    assert process.returncode == 1
    assert "TooManyFailures" in said
    assert "goes on by itself" not in said
    assert attempts(tmp_path / "runs" / "test") == [1]
