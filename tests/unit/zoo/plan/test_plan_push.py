"""How long a push is foreseen to take: by hand, from the bytes that the run's own plan puts on each link."""

from __future__ import annotations

from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll_zoo.fsdp2.layout import RankLayout
from reroll_zoo.plan.cluster import ClusterConfig, EfficiencyConfig
from reroll_zoo.plan.known import KNOWN
from reroll_zoo.plan.plan import make_plan
from reroll_zoo.plan.push import Push, push_way, ring_seconds, sent_bytes
from reroll_zoo.plan.shape import shape_of

PERFECT = EfficiencyConfig(train=1, prefill=1, decode=1, link=1, memory=1, length=1, step_overhead_ms=0)
EIGHT_NODES = ClusterConfig(device="h100", num=8, nodes=8, efficiency=PERFECT)
GB = 10**9


def devices(first: int, last: int, *, every: int = 1) -> tuple[str, ...]:
    return tuple(str(device) for device in range(first, last, every))


def push_s(*, nodes: int, **changes: Any) -> float:
    """Of a run whose policy and engines have half of the nodes each, unless changed."""
    half = 4 * nodes
    tree: dict[str, Any] = {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "run": {"name": "plan"},
        "runtime": {"kind": "ray"},
        "policy": {
            "model": "Qwen/Qwen3-235B-A22B",
            "devices": f"0-{half - 1}",
            "strategy": {"kind": "fsdp2", "ep": 8, "precision": "bf16"},
        },
        "engine": {"kind": "vllm", "devices": f"{half}-{2 * half - 1}", "tp": 8, "num_workers": nodes // 2},
        "data": {"train": [{"kind": "jsonl", "path": "rows.jsonl", "domain": "math"}]},
        "rewards": {"math": {"kind": "math"}},
    }
    config = parse_config({**tree, **changes}, runs_here=False)
    return make_plan(config, ClusterConfig(device="h100", num=8, nodes=nodes)).seconds("push")


@pytest.mark.parametrize("model", sorted(KNOWN))
def test_the_ranks_of_a_planned_policy_send_the_whole_model_and_each_its_share(model: str) -> None:
    shape = shape_of(model)
    for replicas in (1, 2):
        layout = RankLayout(num_ranks=32, ep=8 if shape.num_experts else 1, replicas=replicas)
        sent = sent_bytes(shape, layout, value_bytes=2)
        assert sum(sent) == 2 * shape.num_parameters
        assert max(sent) < (1.02 if replicas == 1 else 1.4) * sum(sent) / 32  # A layer has few parts to give out.


def test_in_the_ring_a_nodes_network_takes_the_model_in_once_however_many_engines_there_are() -> None:
    sent = (GB,) * 32
    for num_nodes in (3, 4):
        push = Push(sent=sent, senders=devices(0, 32), engines=devices(32, 32 + 8 * num_nodes, every=8))
        assert ring_seconds(push, EIGHT_NODES) == pytest.approx(32 / 50)
    eight_on_a_node = Push(sent=sent, senders=devices(0, 32), engines=devices(32, 64))
    # What enters at the seven others of a node comes by again, for those before them.
    assert ring_seconds(eight_on_a_node, EIGHT_NODES) == pytest.approx(32 / 50 * (1 + 7 / 32))


def test_one_sender_among_many_engines_fills_the_ring_as_it_sends() -> None:
    push = Push(sent=(8 * GB, 0), senders=devices(0, 2), engines=devices(8, 40, every=8))
    num_chunks = 12
    assert ring_seconds(push, EIGHT_NODES) == pytest.approx(8 / 50 * (num_chunks + 3) / num_chunks)


def test_the_way_follows_the_devices_as_it_does_in_a_run() -> None:
    def way(engines: tuple[str, ...], kind: Any = "auto") -> str:
        return push_way(Push(sent=(1,) * 4, senders=devices(0, 4), engines=engines), kind)

    assert way(devices(0, 4)) == "beside"
    assert way(devices(4, 8)) == "ring"
    assert way(devices(2, 6)) == way(("cpu",)) == way(devices(0, 4), "store") == way(("4", "4")) == "store"


def test_half_a_terabyte_reaches_256_gpus_on_the_other_half_of_512_in_less_than_15_seconds() -> None:
    """An engine's node takes 470 GB in, at 35 GB/s, while its worker puts them by; then its eight GPUs load a share each."""
    model_gb = 2 * shape_of("Qwen/Qwen3-235B-A22B").num_parameters / 1e9
    by_hand = model_gb / (50 * 0.7) + model_gb / 8 / (55 * 0.7)
    assert push_s(nodes=64) == pytest.approx(by_hand, rel=0.01)
    assert push_s(nodes=64) < 15
    assert push_s(nodes=16) == pytest.approx(push_s(nodes=64), rel=0.01), "more engines take no longer"
    assert push_s(nodes=64, weights={"kind": "store"}) > 400, "through the controller's node"


def test_engines_beside_the_policy_wait_until_every_node_has_put_the_model_together() -> None:
    model_gb = 2 * shape_of("Qwen/Qwen3-32B").num_parameters / 1e9
    policy = {"model": "Qwen/Qwen3-32B", "devices": "0-15", "strategy": {"kind": "fsdp2", "precision": "bf16"}}
    beside = push_s(nodes=2, policy=policy, engine={"devices": "0-15", "num_workers": 16})
    assert beside == pytest.approx(model_gb / (50 * 0.7))
