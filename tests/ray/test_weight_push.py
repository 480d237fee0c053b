"""Processes that die in the middle of a push: engines are left out, a policy ends the run. And whole runs, each way."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from reroll.config.load import parse_config
from reroll.config.parts import ModelConfig, ProcessesRuntimeConfig, RuntimeConfig
from reroll.config.weights import WeightsConfig, WeightsKind
from reroll.errors import WorkerDied
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.worker import InferWorker
from reroll.pipeline.run import train
from reroll.pipeline.weight_sync import WeightSync
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime, Workers
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll.types import Request, SamplingParams
from reroll.weights.buckets import Bucket
from reroll_zoo.ray.config import RayRuntimeConfig


class MortalTrainer(TrainWorker):
    """A policy whose weights change without a batch, and whose process ends at the second bucket if told so."""

    is_doomed = False

    def nudge(self) -> None:
        with torch.no_grad():
            for parameter in self._strategy._parameters.values():  # type: ignore[attr-defined]
                parameter *= 1.01

    def doom(self) -> None:
        self.is_doomed = True

    def next_bucket(self) -> Bucket | None:
        bucket = super().next_bucket()
        if self.is_doomed and bucket is not None and bucket.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return bucket


class MortalEngine(InferWorker):
    """An engine that shows its weights, and whose process ends at the second bucket if told so."""

    is_doomed = False

    def held(self) -> dict[str, Tensor]:
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return {name: parameter.detach().clone() for name, parameter in engine._runner._parameters.items()}

    def doom(self) -> None:
        self.is_doomed = True

    def take_weights(self, pieces: Sequence[Bucket]) -> None:
        if self.is_doomed and pieces[0].index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().take_weights(pieces)


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@dataclass
class Scene:
    runtime: Runtime
    trainers: Workers[MortalTrainer]
    engines: Workers[MortalEngine]
    policy: TrainCluster
    cluster: InferCluster

    def sync(self, kind: WeightsKind, *, delta: bool = False) -> WeightSync:
        config = WeightsConfig(kind=kind, bucket_mb=0.01, delta=delta)
        return WeightSync(self.policy, self.cluster, config, share_memory=False, snapshot=False, host=self.runtime.host)

    async def assert_in_step(self, ranks: list[int], *, version: int) -> None:
        want = await self.policy.weights()
        for rank in ranks:
            held = await self.engines.one(rank, MortalEngine.held)
            assert all(torch.equal(held[name], tensor) for name, tensor in want.items())
        sampling = SamplingParams(max_tokens=4, min_tokens=4)
        for number in range(4):
            request = Request(id=f"{version}.{number}", prompt_ids=(5 + number, 9), sampling=sampling)
            assert (await self.cluster.generate(request)).versions == ((version, 4),)


RUNTIMES: dict[str, RuntimeConfig] = {
    "processes": ProcessesRuntimeConfig(kind="processes"),
    "ray": RayRuntimeConfig(kind="ray"),
}


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
async def scene(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Scene]:
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    async with make_runtime(RUNTIMES[request.param]) as runtime:
        config = ModelConfig(model=str(tiny_model), devices="cpu")
        trainers = await runtime.spawn(MortalTrainer, Placement("policy", ("cpu",)), config, total_steps=1)
        placement = Placement("engine", ("cpu",) * 3, concurrency=CONCURRENCY)
        engines = await runtime.spawn(MortalEngine, placement, model=str(tiny_model), precision="fp32", max_running=4)
        cluster = InferCluster(engines)  # type: ignore[arg-type]
        yield Scene(runtime, trainers, engines, TrainCluster(trainers), cluster)  # type: ignore[arg-type]
        await cluster.close()


async def test_who_dies_in_the_middle_of_a_push_is_left_out_and_the_others_get_the_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reroll.infer.cluster.RESTART_PAUSE_S", 3600.0)  # Those who die here stay dead.
    broadcast, store = scene.sync("broadcast"), scene.sync("store", delta=True)
    await broadcast.push(version=1)
    await scene.assert_in_step([0, 1, 2], version=1)

    await scene.trainers.broadcast(MortalTrainer.nudge)
    await scene.engines.one(0, MortalEngine.doom)
    stats = await broadcast.push(version=2)
    assert stats["push/tries"].value == 2, "a group that lost a member is formed anew"
    await scene.assert_in_step([1, 2], version=2)

    whole = (await store.push(version=3))["push/bytes"].value
    await scene.trainers.broadcast(MortalTrainer.nudge)
    await scene.engines.one(1, MortalEngine.doom)
    stats = await store.push(version=4)
    assert stats["push/tries"].value == 1, "the others need not wait for it"
    await scene.assert_in_step([2], version=4)
    assert (await store.push(version=5))["push/bytes"].value == whole, "whoever is there now may know no version"

    await scene.trainers.broadcast(MortalTrainer.doom)
    with pytest.raises(WorkerDied, match=r"worker policy\[0\] is gone.*--resume"):
        await store.push(version=6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize(
    "weights", [{"kind": "broadcast", "bucket_mb": 0.02}, {"kind": "disk", "delta": True}, {"kind": "store"}]
)
def test_a_run_has_the_same_curve_whatever_way_its_weights_take(rlvr_tree: dict[str, Any], weights: dict[str, Any]) -> None:
    local = curve(rlvr_tree, name="local")
    assert curve(rlvr_tree, name="apart", runtime={"kind": "ray"}, weights=weights) == pytest.approx(local, abs=1e-6)


def curve(tree: dict[str, Any], *, name: str, **parts: dict[str, Any]) -> list[float]:
    tree = {**copy.deepcopy(tree), **parts}
    tree["run"] |= {"name": name, "steps": 2}
    folder = Path(tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(tree, folder=folder), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]
