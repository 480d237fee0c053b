"""GPUs by what their nodes are: labels and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reroll.config.host import parse_devices
from reroll.config.load import parse_config
from reroll.config.parts import DeviceSelectionConfig
from reroll.errors import ConfigError
from reroll_zoo.gpu_nodes import GpuNode, GpuNodes
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.ray.placement import gpu_node

NODES = GpuNodes(
    [
        GpuNode(2, {"pool": "rollout", "rack": "1"}, 48),
        GpuNode(4, {"pool": "train", "rack": "1"}, 141),
        GpuNode(4, {"pool": "train", "rack": "2"}, 80),
        GpuNode(2, {"pool": "rollout", "rack": "2"}, None),
    ]
)


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        ({"gpus": 2, "label": {"pool": "train"}}, "2 3"),
        ({"gpus": 6, "label": {"pool": "train"}}, "2 3 4 5 6 7"),
        ({"gpus": 2, "label": {"pool": "train"}, "skip": 4}, "6 7"),
        ({"gpus": 1, "label": {"pool": "train", "rack": "2"}}, "6"),
        ({"gpus": 3, "label": {"pool": "rollout"}}, "0 1 10"),
        ({"gpus": 5, "min_memory_gb": 80}, "2 3 4 5 6"),
        ({"gpus": 4, "min_memory_gb": 80, "label": {"rack": "2"}}, "6 7 8 9"),
        ({"gpus": 12}, " ".join(map(str, range(12)))),
    ],
)
def test_a_selection_is_the_first_gpus_of_the_nodes_that_match(selection: dict[str, Any], indices: str) -> None:
    assert NODES.select(DeviceSelectionConfig(**selection)) == tuple(indices.split())
    assert parse_devices(DeviceSelectionConfig(**selection), num_gpus=12, nodes=NODES) == tuple(indices.split())


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (
            {"gpus": 4, "label": {"pool": "a100"}},
            "no 4 GPUs carry pool=a100: the cluster has 2 GPUs (pool=rollout, rack=1, 48 GB",
        ),
        ({"gpus": 9, "label": {"pool": "train"}}, "no 9 GPUs carry pool=train (8 do)"),
        ({"gpus": 3, "label": {"pool": "train"}, "skip": 6}, "no 3 GPUs carry pool=train after the first 6 (8 do)"),
        ({"gpus": 5, "min_memory_gb": 100}, "no 5 GPUs have 100 GB (4 do)"),
        ({"gpus": 3, "min_memory_gb": 40, "label": {"pool": "rollout"}}, "say it: ray start --labels gpu-memory-gb="),
    ],
)
def test_too_few_gpus_are_refused_with_what_there_is(selection: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="the cluster has") as caught:
        NODES.select(DeviceSelectionConfig(**selection))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "memory_gb"),
    [
        ({"ray.io/accelerator-type": "H200"}, 141),
        ({"ray.io/accelerator-type": "A100-80G"}, 80),
        ({"ray.io/accelerator-type": "A100"}, None),
        ({"ray.io/accelerator-type": "A100", "gpu-memory-gb": "40"}, 40),
        ({}, None),
    ],
)
def test_a_nodes_memory_is_what_its_label_says_else_what_its_kind_is_sold_with(
    labels: dict[str, str], memory_gb: float | None
) -> None:
    assert gpu_node(8, labels).memory_gb == memory_gb


def test_a_memory_label_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="gpu-memory-gb=lots: give the GB of one GPU as a number"):
        gpu_node(8, {"gpu-memory-gb": "lots"})


MIXED = {
    "nodes": [
        {"device": "h200", "num": 4, "labels": {"pool": "train"}},
        {"device": "l40s", "num": 2, "count": 2, "labels": {"pool": "rollout"}},
    ]
}


def test_a_mixed_cluster_numbers_devices_through_its_kinds() -> None:
    cluster = ClusterConfig.model_validate(MIXED)
    assert (cluster.num_devices, cluster.is_mixed, cluster.devices_per_node) == (8, True, 2)
    assert [cluster.spec_of(str(index)).name for index in range(8)] == ["h200"] * 4 + ["l40s"] * 4
    assert [cluster.node_of(str(index)) for index in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert cluster.gpu_nodes.select(DeviceSelectionConfig(gpus=3, label={"pool": "rollout"})) == ("4", "5", "6")
    assert cluster.gpu_nodes.select(DeviceSelectionConfig(gpus=4, min_memory_gb=80)) == ("0", "1", "2", "3")


def test_a_role_reckons_with_the_weakest_device_it_is_on() -> None:
    cluster = ClusterConfig.model_validate(MIXED)
    alone, both = cluster.part(["0", "1"]), cluster.part(["3", "4", "6"])
    assert (alone.spec.name, alone.num, alone.nodes) == ("h200", 4, 1)
    assert (both.spec.name, both.num, both.nodes) == ("h200 and l40s", 2, 3)
    assert (both.spec.memory_gib, both.spec.bf16_tflops, both.spec.link_gb_s) == (44.4, 362.0, 25.0)
    equal = ClusterConfig(device="h100", nodes=2)
    assert equal.part(["0", "15"]) == equal


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({**MIXED, "device": "h100"}, "device and num belong into its entries"),
        ({"nodes": [{"device": "cpu"}]}, "list the nodes that have GPUs"),
        ({"nodes": [{"device": "h1000"}]}, "no data sheet has this name"),
        ({"nodes": [{"device": "h100", "counts": 2}]}, r"cluster.nodes.0.counts: unknown key \(did you mean count\?"),
        ({"nodes": 0}, "cluster.nodes"),
    ],
)
def test_what_no_cluster_can_be_is_refused(rlvr_tree: dict[str, Any], cluster: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(rlvr_tree | {"cluster": cluster})


def check(tree: dict[str, Any], **policy: Any) -> Any:
    tree["policy"] |= policy
    return parse_config(tree, folder=Path(tree["run"]["runs_dir"]).parent)


TRAIN = {"gpus": 4, "label": {"pool": "train"}}


def test_a_selection_is_checked_against_the_cluster_that_the_file_names(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"runtime": {"kind": "ray", "address": "auto"}, "cluster": MIXED}
    sharded: dict[str, Any] = {"strategy": {"kind": "fsdp2"}}
    assert check(rlvr_tree, devices=TRAIN, **sharded).policy.devices == DeviceSelectionConfig(gpus=4, label={"pool": "train"})
    with pytest.raises(ConfigError, match=r"policy.devices: no 5 GPUs carry pool=train \(4 do\): the cluster has"):
        check(rlvr_tree, devices={**TRAIN, "gpus": 5}, **sharded)
    with pytest.raises(ConfigError, match=r"policy.strategy: its ranks"):
        check(rlvr_tree, devices={**TRAIN, "gpus": 3}, strategy={"kind": "fsdp2", "tp": 2})


def test_auto_is_refused_where_it_matters_which_nodes_a_role_gets(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"runtime": {"kind": "ray", "address": "auto"}, "cluster": MIXED}
    with pytest.raises(ConfigError, match=r"policy.devices: is auto, and the cluster has nodes of several kinds"):
        check(rlvr_tree, devices="auto")


def test_where_only_ray_knows_the_nodes_a_selection_is_let_pass(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["runtime"] = {"kind": "ray", "address": "auto"}
    assert check(rlvr_tree, devices={"gpus": 1, "label": {"pool": "anything"}})
    with pytest.raises(ConfigError, match=r"policy.devices: selects 4 GPUs for 1 worker \(set policy.devices.gpus to 1\)"):
        check(rlvr_tree, devices=TRAIN)


def test_one_process_takes_indices_only(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy.devices: selects GPUs among nodes.*runtime: \{kind: ray\}"):
        check(rlvr_tree, devices={"gpus": 1})


def test_a_typing_error_in_a_selection_is_reported_where_it_stands(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["runtime"] = {"kind": "ray"}
    with pytest.raises(ConfigError) as caught:
        check(rlvr_tree, devices={"gpus": 1, "labels": {}})
    assert [(found.path, found.fix) for found in caught.value.violations] == [("policy.devices.labels", "did you mean label?")]
