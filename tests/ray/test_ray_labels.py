"""Devices by label and memory, and workers that span several GPUs, on a Ray cluster of three unlike nodes.

The GPUs are logical: Ray hands out their ids without touching one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest
import ray
from ray.cluster_utils import Cluster

from reroll.config.parts import DeviceSelectionConfig
from reroll.errors import RerollError
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime, WorkerInfo
from reroll.runtime.devices import DeviceMap
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.vllm.config import VllmEngineConfig

LABELS = {
    "head": {"pool": "rollout", "gpu-memory-gb": "24"},
    "h100": {"pool": "train", "ray.io/accelerator-type": "H100"},
    "l40s": {"pool": "rollout", "ray.io/accelerator-type": "L40S"},
}
TRAIN = DeviceSelectionConfig(gpus=4, label={"pool": "train"})
ROLLOUT = DeviceSelectionConfig(gpus=3, label={"pool": "rollout"})


class Where(NamedTuple):
    """The place a worker woke up in."""

    pool: str
    accelerator: str | None
    visible_gpus: str | None
    device: str


class Scout:
    """A worker that reports where it is."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def where(self) -> Where:
        labels = ray.get_runtime_context().get_node_labels()
        kind = labels.get("ray.io/accelerator-type")
        return Where(labels["pool"], kind, os.environ.get("CUDA_VISIBLE_DEVICES"), self.info.device)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "labels": LABELS["head"]}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1, num_gpus=4, labels=LABELS["h100"])
    made.add_node(num_cpus=1, num_gpus=2, labels=LABELS["l40s"])
    yield made
    made.shutdown()


@pytest.fixture
async def runtime(cluster: Cluster) -> AsyncIterator[Runtime]:
    async with make_runtime(RayRuntimeConfig(kind="ray", address=cluster.address)) as made:
        yield made


async def scout(runtime: Runtime, role: str, *seats: str | tuple[str, ...]) -> list[Where]:
    workers = await runtime.spawn(Scout, Placement(role, seats))
    return await workers.broadcast(Scout.where)


async def test_a_role_wakes_up_on_the_nodes_that_carry_its_label(runtime: Runtime) -> None:
    assert [place.pool for place in await scout(runtime, "policy", *runtime.devices(TRAIN)[::3])] == ["train"] * 2
    engine = await scout(runtime, "engine", *runtime.devices(ROLLOUT))
    assert [place.pool for place in engine] == ["rollout"] * 3
    assert sorted(place.accelerator or "" for place in engine) == ["", "L40S", "L40S"]


async def test_memory_is_known_by_a_nodes_label_or_by_the_kind_that_ray_found(runtime: Runtime) -> None:
    [large] = await scout(runtime, "policy", *runtime.devices(DeviceSelectionConfig(gpus=1, min_memory_gb=80)))
    assert large.accelerator == "H100"
    at_least_24, at_least_48 = (runtime.devices(DeviceSelectionConfig(gpus=6, min_memory_gb=size)) for size in (24, 48))
    assert set(at_least_24) - set(at_least_48) == {"0"}, "the head's GPU has 24 GB, and is the first"


async def test_roles_with_the_same_selection_share_its_gpus_and_take_turns(runtime: Runtime) -> None:
    policy, engine = runtime.devices(TRAIN), runtime.devices(TRAIN)
    assert await scout(runtime, "policy", policy[0]) == await scout(runtime, "engine", engine[0])
    later = runtime.devices(DeviceSelectionConfig(gpus=2, label={"pool": "train"}, skip=2))
    devices = DeviceMap({"policy": policy, "engine": engine, "judge": runtime.devices(ROLLOUT), "critic": later})
    assert devices.overlap("policy", "engine")
    assert devices.evicted("policy", by="critic") == (0, 1, 2, 3)
    assert not devices.overlap("policy", "judge")


async def test_gpus_that_no_node_carries_are_refused_with_what_the_cluster_has(runtime: Runtime) -> None:
    with pytest.raises(RerollError, match=r"no 4 GPUs carry pool=a100: the cluster has .*4 GPUs \(.*pool=train.*80 GB each\)"):
        runtime.devices(DeviceSelectionConfig(gpus=4, label={"pool": "a100"}))


async def test_a_worker_that_spans_gpus_sees_them_all_on_one_node_beside_those_that_have_one(runtime: Runtime) -> None:
    devices = runtime.devices(TRAIN)
    seats = VllmEngineConfig(kind="vllm", tp=2, num_workers=2).ranks(devices)
    engine = await scout(runtime, "engine", *seats)
    assert engine == [Where("train", "H100", visible, "cuda:0") for visible in ("0,1", "2,3")]
    whole, alone = await scout(runtime, "others", devices, devices[1])
    assert (whole.visible_gpus, alone.visible_gpus) == ("0,1,2,3", "1"), "others share them, one GPU or all"


async def test_a_worker_that_no_node_has_gpus_for_is_refused_with_the_sizes_of_the_nodes(runtime: Runtime) -> None:
    everything = runtime.devices("auto")
    with pytest.raises(
        RerollError, match=r"a worker of engine spans GPUs 0, 1, .* not on one node: the nodes have [124, ]+ GPUs"
    ):
        await scout(runtime, "engine", everything)
    await scout(runtime, "policy", "0", "1")
    with pytest.raises(RerollError, match=r"GPUs 0, 1, which are not on one node.*Lower tp"):
        await scout(runtime, "engine", ("0", "1"))
