"""Engines that join a run while it goes on, and leave it with their node. The nodes are simulated, as are their GPUs."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

import reroll_zoo.ray.runtime
from reroll.config.load import parse_config
from reroll.infer.cluster import InferCluster
from reroll.observe.journal import SampleState, read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.pipeline.weight_sync import WeightSync
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, WorkerInfo
from reroll_zoo.audit.audit import audit
from reroll_zoo.ray.config import RayRuntimeConfig

pytestmark = pytest.mark.slow

NUM_STEPS = 4
SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 3, "num_gpus": 1, "include_dashboard": False, "_system_config": SOON}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def _compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(role: str, rank: int, world_size: int, device: str) -> WorkerInfo:
        return WorkerInfo(role, rank, world_size, "cpu")

    monkeypatch.setattr(reroll_zoo.ray.runtime, "WorkerInfo", on_cpu)


class Guest:
    """A worker that can say that it is there."""

    def __init__(self, info: WorkerInfo) -> None:
        self.rank = info.rank

    def number(self) -> int:
        return self.rank


async def test_workers_join_on_nodes_that_have_none_and_leave_their_place_to_others(cluster: Cluster) -> None:
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as runtime:
        workers = await runtime.spawn(Guest, Placement("engine", ("cpu",)))
        assert await workers.join(4) == [], "the head has its worker"
        node = cluster.add_node(num_cpus=1)
        assert await workers.join(4) == [None]
        assert await workers.broadcast(Guest.number) == [0, 1]
        assert await workers.join(4) == []
        await workers.leave(1)
        assert await workers.join(4) == [None], "its place is free again"
        assert await workers.one(2, Guest.number) == 2
    cluster.remove_node(node)


def run(tree: dict[str, Any], *, name: str, **parts: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    run_part = {**tree["run"], "name": name, "steps": NUM_STEPS}
    return train(parse_config(tree | parts | {"run": run_part}, folder=folder), code_folder=folder)


def curve(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def test_an_engine_joins_on_a_node_that_comes_serves_and_leaves_with_it(
    cluster: Cluster, rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = run(rlvr_tree, name="alone")
    engines: list[InferCluster] = []
    nodes: list[Any] = []
    served: list[bool] = []

    async def generate(self: InferCluster, *args: Any, _generate: Any = InferCluster.generate) -> Any:
        if self not in engines:
            engines.append(self)
        joined = self._states[1:]
        if joined and joined[0].status and joined[0].status.num_tokens and not served:
            served.append(True)
            cluster.remove_node(nodes[0], allow_graceful=False)
        return await _generate(self, *args)

    async def push(self: WeightSync, *, version: int, _push: Any = WeightSync.push) -> Any:
        if version == 1:  # The first step went by with one engine.
            assert len(engines[0]._states) == 1
            nodes.append(cluster.add_node(num_cpus=0, num_gpus=1))
            while len(engines[0]._states) == 1:
                await asyncio.sleep(0.05)
        return await _push(self, version=version)

    monkeypatch.setattr(InferCluster, "generate", generate)
    monkeypatch.setattr(WeightSync, "push", push)
    monkeypatch.setattr("reroll.infer.cluster.JOIN_PAUSE_S", 0.5)
    parts = {"runtime": {"kind": "ray", "address": cluster.address}, "engine": {"devices": "elastic", "report_every": 1}}
    with caplog.at_level(logging.WARNING, "reroll.infer.cluster"):
        outcome = run(rlvr_tree, name="joined", **parts)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "engine[1] has joined: it serves with the next push" in said
    assert served, "requests were routed to it"
    assert "engine[1] is gone" in said
    assert outcome.restarts == 0
    events = read_journal(outcome.folder / "journal")
    trained = collections.Counter(event.sample_id for event in events if event.state is SampleState.TRAINED)
    assert set(trained.values()) == {1}
    assert len(trained) == NUM_STEPS * 16
    assert curve(outcome) == curve(alone), "whoever writes a token, it is the same"
    assert not audit(outcome.folder / "journal", max_staleness=0).violations
