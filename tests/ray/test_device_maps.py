"""Whole runs on device maps, on a Ray cluster of three nodes with eight logical GPUs: the curve does not tell who sits where.

Ray hands out GPU ids without touching one; the workers behind them are told to compute on the CPU. All of it is slow: places on
Ray have quick tests in test_ray_placement.py, turns on shared devices in tests/unit/runtime, and the curve of a run on Ray in
tests/invariant/test_runtimes_agree.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

import reroll_zoo.ray.runtime
from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.infer.cluster import InferCluster
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.runtime import make_runtime
from reroll.runtime.base import WorkerInfo
from reroll.training.cluster import TrainCluster
from reroll_zoo.plan.planner import assign_devices
from reroll_zoo.ray.config import RayRuntimeConfig


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=2, num_gpus=2)
    made.add_node(num_cpus=2, num_gpus=2)
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def _compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(role: str, rank: int, world_size: int, device: str) -> WorkerInfo:
        return WorkerInfo(role, rank, world_size, "cpu")

    monkeypatch.setattr(reroll_zoo.ray.runtime, "WorkerInfo", on_cpu)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Who was sent away from devices and called back, in order."""
    seen: list[tuple[str, Any]] = []
    sleep, wake, to = InferCluster.sleep, InferCluster.wake, TrainCluster.to

    async def noted_sleep(self: InferCluster, ranks: Sequence[int] | None = None) -> None:
        seen.append(("engine sleeps", ranks))
        await sleep(self, ranks)

    async def noted_wake(self: InferCluster, ranks: Sequence[int] | None = None) -> None:
        seen.append(("engine wakes", ranks))
        await wake(self, ranks)

    async def noted_to(self: TrainCluster, device: str | None, *, weights: bool = True) -> None:
        seen.append(("policy to", device))
        await to(self, device, weights=weights)

    monkeypatch.setattr(InferCluster, "sleep", noted_sleep)
    monkeypatch.setattr(InferCluster, "wake", noted_wake)
    monkeypatch.setattr(TrainCluster, "to", noted_to)
    return seen


def run(tree: dict[str, Any], *, name: str, **parts: dict[str, Any]) -> Outcome:
    tree = copy.deepcopy(tree)
    tree["run"] |= {"name": name, "steps": 2}
    for part, fields in parts.items():
        tree[part] = {**tree.get(part, {}), **fields}
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def curve(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


COLOCATED_MOVES = [("engine sleeps", (0,)), ("policy to", None), ("policy to", "cpu"), ("engine wakes", (0,))]


@pytest.mark.parametrize(
    ("policy", "engine", "expected_moves"),
    [
        pytest.param(0, {"devices": 0}, [("policy to", "cpu"), *COLOCATED_MOVES * 2], id="colocated", marks=pytest.mark.slow),
        pytest.param(0, {"devices": [4, 6], "num_workers": 2}, [], id="disjoint", marks=pytest.mark.slow),
        # Of the workers on GPUs 1 and 5, only the one on GPU 1 makes room.
        pytest.param(
            1,
            {"devices": [1, 5], "num_workers": 2},
            [("policy to", "cpu"), *COLOCATED_MOVES * 2],
            id="overlapping",
            marks=pytest.mark.slow,
        ),
        pytest.param("auto", {"devices": "auto", "num_workers": 2}, None, id="auto", marks=pytest.mark.slow),
    ],
)
def test_a_map_gives_the_curve_and_the_weights_of_the_local_run(
    cluster: Cluster,
    rlvr_tree: dict[str, Any],
    moves: list[tuple[str, Any]],
    policy: Any,
    engine: dict[str, Any],
    expected_moves: list[tuple[str, Any]] | None,
) -> None:
    local = run(rlvr_tree, name="local")
    assert moves == [], "who shares no GPU never moves"
    mapped = run(
        rlvr_tree,
        name="mapped",
        runtime={"kind": "ray", "address": cluster.address, "num_gpus": 8},
        policy={"devices": policy, "swap": "all"},
        engine={**engine, "sleep": True},
    )
    assert curve(mapped) == pytest.approx(curve(local), abs=1e-6)
    mine, other = (AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (local, mapped))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)
    if expected_moves is not None:
        assert moves == expected_moves


@pytest.mark.slow
def test_a_sharded_trainer_and_an_engine_that_shrinks_around_it_give_the_curve_of_the_local_run(
    cluster: Cluster, rlvr_tree: dict[str, Any], moves: list[tuple[str, Any]]
) -> None:
    local = curve(run(rlvr_tree, name="local"))
    mapped = run(
        rlvr_tree,
        name="sharded",
        runtime={"kind": "ray", "address": cluster.address, "num_gpus": 8},
        policy={"devices": "2-3", "strategy": {"kind": "fsdp2"}, "swap": "optimizer"},
        engine={"devices": "2-5", "num_workers": 4, "sleep": True},
    )
    assert curve(mapped) == pytest.approx(local, abs=1e-4)
    assert [ranks for what, ranks in moves if what.startswith("engine")] == [(0, 1)] * 4


@pytest.mark.slow
async def test_auto_is_planned_for_the_gpus_that_the_cluster_has(cluster: Cluster, rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["policy"]["devices"] = rlvr_tree["engine"]["devices"] = "auto"
    rlvr_tree["rollout"]["max_staleness"] = 1
    rlvr_tree["runtime"] = {"kind": "ray", "address": cluster.address}
    config = parse_config(rlvr_tree, folder=Path(rlvr_tree["run"]["runs_dir"]).parent)
    assert isinstance(config, RlvrConfig)
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as runtime:
        planned = assign_devices(config, num_gpus=runtime.num_gpus)
        engine = runtime.devices(planned.engine.devices)
        assert runtime.num_gpus == 8
        assert len(engine) == planned.engine.num_workers
        assert set(engine) <= set(map(str, range(8)))
