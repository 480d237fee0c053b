"""Replicas: checkpoints in this machine's memory, and when there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reroll.config.load import parse_config
from reroll.config.parts import PolicyConfig
from reroll.pipeline.restarts import Restarts
from reroll.pipeline.resume import STATE_FILE, read_state
from reroll.runtime.base import Placement
from reroll.runtime.local import LocalRuntime
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll_zoo.replicas import replicas
from reroll_zoo.replicas.place import SHARED_MEMORY, has_room, is_ours, make_place, place_of, remove_all_of, sweep
from reroll_zoo.replicas.replicas import MemoryReplicas, open_replicas
from reroll_zoo.tiny_models import make_tiny

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no shared memory with files")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


@pytest.fixture
def own(place: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryReplicas:
    """That may cost whatever they cost."""
    monkeypatch.setattr(replicas, "FIRST_COST_S", 0)
    return MemoryReplicas(place, share=1e9)


@pytest.fixture
async def policy(model: Path) -> Any:
    async with LocalRuntime() as runtime:
        config = PolicyConfig(model=str(model))
        yield TrainCluster(await runtime.spawn(TrainWorker, Placement("policy", ("cpu",)), config, total_steps=10))


def state(step: int) -> dict[str, Any]:
    return {"steps": step, "evals": {}, "pipeline": {}}


async def taken(own: MemoryReplicas, step: int, policy: TrainCluster) -> None:
    await own.take_if_due(step, {"": policy}, state(step))
    await own.finish()


async def test_the_newest_is_kept_and_is_a_checkpoint_like_any_other(own: MemoryReplicas, place: Path, policy: Any) -> None:
    for step in (1, 2):
        await taken(own, step, policy)
    newest = MemoryReplicas(place, share=0.01).newest()
    assert newest is not None
    assert (newest.step, read_state(newest)["steps"]) == (2, 2)
    assert [path.name for path in newest.path.parent.iterdir()] == ["step-000002"]
    before = {name: tensor.clone() for name, tensor in (await policy.weights()).items()}
    for tensor in (await policy.weights()).values():
        tensor.zero_()
    await policy.load(newest.path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in (await policy.weights()).items())


async def test_one_that_is_damaged_or_half_written_is_deleted_and_not_gone_on_from(
    own: MemoryReplicas, place: Path, policy: Any
) -> None:
    await taken(own, 3, policy)
    newest = own.newest()
    assert newest is not None
    half = newest.path.with_name(".unfinished-000004")
    half.mkdir()
    assert own.newest() == newest
    assert not half.exists()
    file = newest.path / STATE_FILE
    file.write_text(json.dumps(state(4)))
    assert own.newest() is None
    assert not newest.path.exists()


async def test_there_are_only_as_many_as_the_share_of_time_allows(
    place: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = MemoryReplicas(place, share=1e-6)
    await taken(never, 1, policy)
    assert not place.exists()  # A run that has just begun has earned none.
    monkeypatch.setattr(replicas, "FIRST_COST_S", 0)
    rare = MemoryReplicas(place, share=1e-6)
    for step in (1, 2, 3):
        await taken(rare, step, policy)
    newest = rare.newest()
    assert newest is not None
    assert newest.step == 1


async def test_where_memory_has_no_room_there_are_none_and_the_run_is_told_so_once(
    own: MemoryReplicas, place: Path, policy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert has_room(1)
    monkeypatch.setattr(replicas, "BYTES_PER_PARAMETER", 10**12)
    for step in (1, 2):
        await taken(own, step, policy)
    assert not place.exists()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no replicas in memory"]


async def test_a_failing_write_ends_the_replicas_and_not_the_run(
    own: MemoryReplicas, place: Path, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await taken(own, 1, policy)
    (place / "checkpoints" / ".unfinished-000002").write_text("in the way")
    await taken(own, 2, policy)
    assert "no replicas in memory" in caplog.text
    assert not place.exists()


async def test_what_others_could_have_written_is_not_touched(own: MemoryReplicas, place: Path, policy: Any) -> None:
    place.mkdir()
    place.chmod(0o777)
    (place / "checkpoints" / "step-000009").mkdir(parents=True)
    assert own.newest() is None
    await taken(own, 1, policy)
    assert own.newest() is None


@pytest.fixture
def tree(rlvr_tree: dict[str, Any]) -> dict[str, Any]:
    return rlvr_tree


def opened(tree: dict[str, Any], tmp_path: Path) -> Iterator[MemoryReplicas | None]:
    with open_replicas(tmp_path, parse_config(tree, folder=tmp_path), Restarts()) as found:
        yield found


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": {"replica_share": 0}},
        {"checkpoint": {"background": False}},
        {"runtime": {"kind": "ray"}},
        {"run": {"restarts": 0}},
    ],
)
def test_there_are_none_where_they_are_not_wanted_or_another_machine_may_go_on(
    tree: dict[str, Any], tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert next(opened(tree, tmp_path)) is not None
    for section, values in changed.items():
        tree[section] = {**tree.get(section, {}), **values}
    assert next(opened(tree, tmp_path)) is None


def test_what_a_killed_process_has_left_goes_when_another_comes_by_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs, ours = place_of(tmp_path, owner=other.pid), place_of(tmp_path, owner=os.getpid())
        for place in (theirs, ours):
            make_place(place)
            (place / "checkpoints").mkdir()
        sweep()
        assert is_ours(theirs)
        assert is_ours(ours)
        other.kill()
    sweep()
    assert not theirs.exists()
    assert is_ours(ours)
    remove_all_of(os.getpid())
    assert not ours.exists()
