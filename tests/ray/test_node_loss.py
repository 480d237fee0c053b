"""Nodes that are lost in the midst of a run: what goes on, what ends, and how it is resumed.

A cluster of simulated nodes: Ray hands out their logical GPUs without touching one; the workers behind them compute on the
CPU. A head of two CPUs and one GPU stays; each test brings the nodes that it takes away.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER
from ray.cluster_utils import Cluster

import reroll_zoo.ray.runtime
from reroll.config.envs import RayEnvsConfig
from reroll.config.load import parse_config
from reroll.config.rewards import ImportRewardConfig, RewardWorkersConfig
from reroll.envs.cluster import EnvCluster
from reroll.errors import EnvLost, WorkerDied
from reroll.infer.cluster import InferCluster
from reroll.observe.journal import SampleState, read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.pipeline.weight_sync import WeightSync
from reroll.rewards.cluster import RewardCluster
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime, WorkerInfo
from reroll.training import cluster as train_cluster
from reroll.training.cluster import TrainCluster
from reroll.types import Completion, FinishReason, Prompt, Request, Status, Trajectory, Turn
from reroll_zoo.games.frozen_lake import FrozenLakeConfig
from reroll_zoo.ray.config import RayRuntimeConfig

SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A node that refuses three calls in a row is lost. One that is slow to answer has ten seconds for each, as always."""
HEAD = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "_system_config": SOON}
HEAD_LOST_S = 300.0
"""Only a hang exceeds it: half a minute of silence, a quarter to leave."""
NUM_REQUESTS_BEFORE_LOSS = 40
"""In the midst of the second step: the evaluation asks ten, each step sixteen."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args=HEAD)
    yield made
    made.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[list[Any]]:
    """Two nodes with one GPU each, and no CPU."""
    made = [cluster.add_node(num_cpus=0, num_gpus=1) for _ in range(2)]
    yield made
    for node in made:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


@pytest.fixture(autouse=True)
def _compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(role: str, rank: int, world_size: int, device: str) -> WorkerInfo:
        return WorkerInfo(role, rank, world_size, "cpu")

    monkeypatch.setattr(reroll_zoo.ray.runtime, "WorkerInfo", on_cpu)


def lose(cluster: Cluster, node_id: str | None) -> None:
    """Take a node away as a power cut would."""
    [node] = [node for node in cluster.list_all_nodes() if node.node_id == node_id]
    cluster.remove_node(node, allow_graceful=False)


def configured(tree: dict[str, Any], *, name: str, **parts: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    tree["run"]["name"] = name
    tree["checkpoint"] = {"every": 1}
    for part, fields in parts.items():
        tree[part] = {**tree.get(part, {}), **fields}
    return tree


def run(tree: dict[str, Any], *, resume: bool = False) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), resume=resume, code_folder=folder)


def on(cluster: Cluster) -> dict[str, Any]:
    return {"kind": "ray", "address": cluster.address}


def curve(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def trained(outcome: Outcome) -> dict[str, int]:
    """How often each sample was trained on."""
    events = read_journal(outcome.folder / "journal")
    return collections.Counter(event.sample_id for event in events if event.state is SampleState.TRAINED)


@pytest.mark.slow  # test_dead_engine.py has a run that loses an engine, and the next quick test here a node that is lost.
def test_a_run_goes_on_without_an_engines_node_and_the_engine_comes_back_on_a_spare_gpu(
    cluster: Cluster,
    nodes: list[Any],
    rlvr_tree: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = run(configured(rlvr_tree, name="whole"))
    num_asked = 0
    engines: list[InferCluster] = []
    lost: list[str | None] = []

    async def generate(self: InferCluster, request: Request, *rest: Any, _generate: Any = InferCluster.generate) -> Completion:
        nonlocal num_asked
        num_asked += 1
        if num_asked == NUM_REQUESTS_BEFORE_LOSS:
            engines.append(self)
            lost.append(self._workers._actors[0].place.node_id)  # type: ignore[attr-defined]
            lose(cluster, lost[0])
        completion: Completion = await _generate(self, request, *rest)
        return completion

    async def push_when_all_are_back(self: WeightSync, *, version: int, _push: Any = WeightSync.push) -> Any:
        while any(engine._restarts for engine in engines):
            await asyncio.sleep(0.1)
        return await _push(self, version=version)

    monkeypatch.setattr(InferCluster, "generate", generate)
    monkeypatch.setattr(WeightSync, "push", push_when_all_are_back)
    monkeypatch.setattr("reroll.infer.cluster.RESTART_PAUSE_S", 1.0)
    with caplog.at_level(logging.WARNING, "reroll.infer.cluster"):
        survived = run(configured(rlvr_tree, name="survived", runtime=on(cluster), engine={"devices": "1-2", "num_workers": 2}))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "engine[0] is gone" in said
    assert "engine[0] was started anew" in said
    back = engines[0]._workers._actors[0].place.node_id  # type: ignore[attr-defined]
    assert back == cluster.head_node.node_id != lost[0]
    assert all(lane.status and lane.status.num_tokens for lane in engines[0]._states), "both served in the last step"
    assert curve(survived) == pytest.approx(curve(whole), abs=1e-6)
    assert trained(survived) == trained(whole)
    assert set(trained(survived).values()) == {1}


def lose_a_rank_in_the_second_update(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_cluster, "GRACE_S", 5.0)
    num_updates = 0

    async def update(self: TrainCluster, *args: Any, _train: Any = TrainCluster.train, **kwargs: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 2:
            lose(cluster, self._workers._actors[1].place.node_id)  # type: ignore[attr-defined]
        return await _train(self, *args, **kwargs)

    monkeypatch.setattr(TrainCluster, "train", update)


@pytest.mark.slow
def test_a_run_that_loses_a_train_ranks_node_ends_clearly_and_resumes_on_the_nodes_left(
    cluster: Cluster, nodes: list[Any], rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(configured(rlvr_tree, name="whole"))
    lose_a_rank_in_the_second_update(cluster, monkeypatch)
    policy = {"devices": "0-1", "strategy": {"kind": "fsdp2"}}
    tree = configured(rlvr_tree, name="bereft", runtime=on(cluster), policy=policy)
    tree["run"]["restarts"] = 0
    with pytest.raises(WorkerDied, match=r"policy\[1\] is gone.*--resume"):
        run(tree)
    cluster.wait_for_nodes(timeout=60)  # Until Ray no longer offers the lost one.
    resumed = run(tree, resume=True)
    assert curve(resumed) == pytest.approx(curve(whole), abs=1e-4)
    assert trained(resumed).keys() == trained(whole).keys()


@pytest.mark.slow
def test_a_run_that_loses_a_train_ranks_node_goes_on_by_itself_on_the_nodes_left(
    cluster: Cluster, nodes: list[Any], rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(configured(rlvr_tree, name="whole"))
    lose_a_rank_in_the_second_update(cluster, monkeypatch)
    policy = {"devices": "0-1", "strategy": {"kind": "fsdp2"}}
    healed = run(configured(rlvr_tree, name="healed", runtime=on(cluster), policy=policy))
    assert healed.restarts >= 1
    assert curve(healed) == pytest.approx(curve(whole), abs=1e-4)
    assert trained(healed).keys() == trained(whole).keys()


class Hog:
    """A worker that takes up room."""

    def __init__(self, info: WorkerInfo) -> None:
        pass


async def test_episodes_of_a_lost_node_are_told_so_samples_are_judged_elsewhere_and_both_planes_are_made_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "lenient.py").write_text("def always(prompt, trajectory):\n    return 1.0\n")
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as runtime:
        await runtime.spawn(Hog, Placement("hog", ("cpu", "cpu")))  # Fills the head.
        doomed = cluster.add_node(num_cpus=2)
        envs, rewards = await open_both(runtime, tmp_path)
        episode = envs.live("lake", 1)
        await episode.reset()
        assert (await judge(rewards)) == 1.0
        other = cluster.add_node(num_cpus=2)
        cluster.remove_node(doomed, allow_graceful=False)
        await judge_until_one_is_lost(rewards)
        while envs.stats()["env/live"].value:
            await asyncio.sleep(0.1)
        with pytest.raises(EnvLost, match="its node was lost"):
            await episode.step("right")
        assert await visit(envs)
        assert (await judge(rewards)) == 1.0
        await envs.close()
        await rewards.close()
    cluster.remove_node(other)


async def open_both(runtime: Runtime, folder: Path) -> tuple[EnvCluster, RewardCluster]:
    envs = await EnvCluster.start(runtime, RayEnvsConfig(kind="ray", num_workers=1), {"lake": FrozenLakeConfig()})
    reward = ImportRewardConfig(kind="import", path="lenient:always")
    one = RewardWorkersConfig(num_workers=1, num_processes=1)
    return envs, await RewardCluster.start(runtime, {"default": reward}, workers=one, config_folder=folder)


async def judge_until_one_is_lost(rewards: RewardCluster) -> None:
    """Processes outlive the daemon of their node by a moment. The sample whose worker is lost gets its verdict all the same."""
    while "judging/default/lost" not in rewards.stats().values_by_name():
        assert (await judge(rewards)) == 1.0


async def visit(envs: EnvCluster) -> bool:
    episode = envs.live("lake", 1)
    opening = await episode.reset()
    await episode.close()
    return len(opening) > 0


async def judge(rewards: RewardCluster) -> float:
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    turn = Turn(prompt_ids=(1,), completion=completion, text="yes")
    prompt = Prompt(id="p", messages=(), domain="default")
    return (await rewards.score(prompt, Trajectory(id="t", turns=(turn,), status=Status.COMPLETED))).value


def cut_the_power(cluster: Cluster) -> None:
    cluster.shutdown()


def stop_the_head(cluster: Cluster) -> None:
    [gcs] = cluster.head_node.all_processes[PROCESS_TYPE_GCS_SERVER]
    os.kill(gcs.process.pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("lose_head", [cut_the_power, stop_the_head])
def test_a_run_whose_head_node_is_lost_ends_says_so_and_resumes_on_a_new_cluster(
    rlvr_tree: dict[str, Any], lose_head: Callable[[Cluster], None]
) -> None:
    rlvr_tree["run"]["steps"] = 6
    whole = run(configured(rlvr_tree, name="whole"))
    first = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    tree = configured(rlvr_tree, name="beheaded", runtime=on(first))
    folder = Path(tree["run"]["runs_dir"]).parent
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    output = folder / "output.txt"
    with output.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "reroll", "train", "run.yaml"], cwd=folder, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        while not list((folder / "runs" / "beheaded" / "checkpoints").glob("step-*")):
            assert process.poll() is None, "the run ended too early"
            time.sleep(0.05)
        lose_head(first)
        assert process.wait(timeout=HEAD_LOST_S) == 1
    finally:
        process.kill()
        process.wait()
        first.shutdown()
    # Ray has words of its own, before and after.
    assert any("Ray cluster" in line and "--resume" in line for line in output.read_text().splitlines())
    second = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        resumed = run({**tree, "runtime": on(second)}, resume=True)
    finally:
        second.shutdown()
    assert curve(resumed) == pytest.approx(curve(whole), abs=1e-6)
