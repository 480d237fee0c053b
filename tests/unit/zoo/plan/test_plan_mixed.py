"""Plans for clusters whose nodes differ, and the launch files that such clusters are started with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError
from reroll_zoo.gpu_nodes import GpuNode, GpuNodes
from reroll_zoo.plan.draw import lanes_of
from reroll_zoo.plan.plan import Plan, make_plan
from reroll_zoo.plan.search import best_plan, candidates, device_violations

EXAMPLES = Path(__file__).parents[4] / "examples"


def mixed(**changes: Any) -> RlvrConfig:
    """The example's config with fields of its roles changed."""
    tree = yaml.safe_load((EXAMPLES / "clusters" / "qwen3_8b_mixed.yaml").read_text())
    for key, value in changes.items():
        part, field = key.split("__")
        tree[part][field] = value
    config = parse_config(tree, runs_here=False)
    assert isinstance(config, RlvrConfig)
    return config


def plan(**changes: Any) -> Plan:
    config = mixed(**changes)
    assert config.cluster is not None
    return make_plan(config, config.cluster)


def test_roles_are_planned_on_the_nodes_that_carry_their_labels() -> None:
    found = plan()
    policy, engine = found.roles
    assert policy.devices == tuple(map(str, range(8)))
    assert engine.ranks == (("8", "9"), ("10", "11"), ("12", "13"), ("14", "15"))
    assert found.fits
    assert [lane.devices for lane in lanes_of(found)] == [policy.devices, engine.devices]


def test_each_device_is_judged_by_its_own_memory() -> None:
    """27 GiB are little on an H200 and too much beside an engine on an L40S."""
    crowded = plan(policy__devices={"gpus": 8, "label": {"pool": "rollout"}})
    assert {load.device for load in crowded.overfull} == set(map(str, range(8, 16)))
    [violation] = device_violations(crowded)
    assert "of the 44.4 GiB of a l40s 40.8 can be planned with" in violation.problem
    assert plan(policy__devices={"gpus": 8, "label": {"pool": "train"}}).fits


def test_a_pool_of_vllm_is_a_share_of_the_gpus_it_is_on() -> None:
    small, large = plan(), plan(engine__devices={"gpus": 8, "label": {"pool": "train"}})
    shares = [sum((found.roles[1].memory.held | found.roles[1].memory.working).values()) for found in (small, large)]
    assert shares[1] / shares[0] == pytest.approx(139.8 / 44.4, rel=1e-3)


def test_a_role_on_devices_of_several_kinds_is_as_fast_as_the_weakest_and_the_plan_says_so() -> None:
    """Four L40S in place of four H200: as if all eight were L40S."""
    both = plan(policy__devices=[4, 5, 6, 7, 8, 9, 10, 11])
    slow = plan(policy__devices=list(range(8, 16)))
    assert both.seconds("train") == pytest.approx(slow.seconds("train"))
    assert both.seconds("train") > plan().seconds("train")
    assert any("policy is on devices of several kinds" in note for note in both.notes)
    assert plan().notes == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engine__devices": "auto"}, r"engine.devices: is auto, and the cluster has nodes of several kinds"),
        ({"policy__devices": {"gpus": 9, "min_memory_gb": 80}}, r"policy.devices: no 9 GPUs have 80 GB \(8 do\)"),
        ({"engine__tp": 8}, r"engine.devices: a worker would span GPUs 8, .* on several nodes"),
        ({"policy__devices": "9-16"}, r"policy.devices: names GPU 16, and the plan is for 16 GPUs"),
    ],
)
def test_what_a_mixed_cluster_cannot_give_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = mixed(**changes)
    assert config.cluster is not None
    with pytest.raises(ConfigError, match=problem):
        best_plan(config, config.cluster)


def test_auto_never_tears_an_engine_over_two_nodes() -> None:
    tree = yaml.safe_load((EXAMPLES / "clusters" / "qwen3_32b_auto.yaml").read_text())
    tree["cluster"] = {"device": "h100", "num": 3, "nodes": 2}
    config = parse_config(tree, runs_here=False)
    assert config.cluster is not None
    for candidate in candidates(config, config.cluster):
        assert isinstance(candidate, RlvrConfig)
        for rank in make_plan(candidate, config.cluster).roles[1].ranks:
            assert len({config.cluster.node_of(device) for device in rank}) == 1


def test_the_kubernetes_manifest_gives_the_mixed_example_what_it_selects() -> None:
    _, job = yaml.safe_load_all((EXAMPLES / "launch" / "kuberay.yaml").read_text())
    nodes = GpuNodes()
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        num_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        nodes = GpuNodes([*nodes, *[GpuNode(num_gpus, group["labels"])] * group["replicas"]])
        assert group["minReplicas"] == group["replicas"], "a run does not start before all are there"
    config = mixed()
    assert len({*nodes.select(config.policy.devices), *nodes.select(config.engine.devices)}) == 16  # type: ignore[arg-type]
    assert "runtime.kind=ray runtime.address=auto" in job["spec"]["entrypoint"]


def test_the_slurm_script_is_sound_bash_and_names_the_ways_to_stop_a_run() -> None:
    script = EXAMPLES / "launch" / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    assert "--signal=B:USR1@" in script.read_text()
