"""GPU indices and roles on a Ray cluster of two nodes. The GPUs are logical: Ray hands out their ids without touching one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import pytest
import ray
from ray.cluster_utils import Cluster

from reroll.errors import RerollError
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime, WorkerInfo
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.ray.placement import reserve_bundles


class Where(NamedTuple):
    """The place a worker woke up in."""

    node_id: str
    visible_gpus: str | None
    device: str


class Scout:
    """A worker that reports where it is."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def where(self) -> Where:
        node_id = ray.get_runtime_context().get_node_id()
        return Where(node_id, os.environ.get("CUDA_VISIBLE_DEVICES"), self.info.device)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=2, num_gpus=4)
    yield made
    made.shutdown()


@pytest.fixture
async def runtime(cluster: Cluster) -> AsyncIterator[Runtime]:
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as made:
        yield made
    assert not ray.is_initialized()


async def scout(runtime: Runtime, role: str, *devices: str) -> list[Where]:
    workers = await runtime.spawn(Scout, Placement(role, devices))
    return await workers.broadcast(Scout.where)


async def test_gpu_indices_run_through_the_nodes_and_roles_share_the_devices_they_both_name(runtime: Runtime) -> None:
    head = ray.get_runtime_context().get_node_id()
    assert runtime.devices("auto") == tuple(map(str, range(8)))
    policy = await scout(runtime, "policy", "0", "3")
    engine = await scout(runtime, "engine", "4", "7")
    assert [place.visible_gpus for place in policy + engine] == ["0", "3"] * 2
    assert {place.node_id for place in policy} == {head}
    assert len({place.node_id for place in engine}) == 1
    assert engine[0].node_id != head
    assert {place.device for place in policy + engine} == {"cuda:0"}

    assert await scout(runtime, "reference", "3", "4") == [policy[1], engine[0]]
    assert await scout(runtime, "critic", "7") == [engine[1]]


async def test_a_gpu_that_does_not_exist_is_refused_with_the_number_there_is(runtime: Runtime) -> None:
    with pytest.raises(RerollError, match="GPU 8 does not exist: Ray sees 8 GPUs"):
        await scout(runtime, "policy", "8")


async def test_gpus_are_given_back_when_the_runtime_closes_and_the_cluster_lives_on(cluster: Cluster) -> None:
    for _ in range(2):
        async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as runtime:
            assert [place.visible_gpus for place in await scout(runtime, "policy", "2", "1")] == ["2", "1"]


async def test_a_cpu_role_sees_the_cpu_and_gives_its_room_back_when_it_stops(runtime: Runtime) -> None:
    for _ in range(2):
        workers = await runtime.spawn(Scout, Placement("reward", ("cpu",) * 3))
        assert [place.device for place in await workers.broadcast(Scout.where)] == ["cpu"] * 3
        await workers.stop()


async def test_any_number_of_workers_share_the_places_that_their_role_asks_for(runtime: Runtime) -> None:
    workers = await runtime.spawn(Scout, Placement("reward", ("cpu",) * 7, num_places=2))
    nodes = [place.node_id for place in await workers.broadcast(Scout.where)]
    assert nodes == [nodes[rank % 2] for rank in range(7)]
    await runtime.spawn(Scout, Placement("policy", ("cpu",) * 2))  # Two of the four CPUs are left.
    await workers.restart(6)
    assert (await workers.one(6, Scout.where)).node_id == nodes[0]


async def test_a_role_that_does_not_fit_is_refused_with_what_is_free(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_timeout_s", 0.5)
    with pytest.raises(RerollError, match=r"no room for role reward: it needs 5 bundles .* of 4 CPUs free"):
        await scout(runtime, "reward", *["cpu"] * 5)


async def test_whoever_waits_for_room_is_out_of_ray_before_it_is_left(cluster: Cluster) -> None:
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as runtime:
        spawning = asyncio.create_task(runtime.spawn(Scout, Placement("many", ("cpu",) * 9)))
        while not is_some_thread_in(reserve_bundles):
            await asyncio.sleep(0.01)
        spawning.cancel()
    assert not is_some_thread_in(reserve_bundles)  # It would never come back, and a program waits for its threads.


def is_some_thread_in(function: Callable[..., Any]) -> bool:
    def frames(innermost: FrameType) -> Iterator[FrameType]:
        frame: FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back

    return any(frame.f_code is function.__code__ for found in sys._current_frames().values() for frame in frames(found))
