"""Maps for `auto` where engines write while the policy is trained: the simulator has the last word."""

from __future__ import annotations

from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.planner import assign_devices
from reroll_zoo.plan.search import best_plan, ranked_plans
from reroll_zoo.simulate.maps import MAX_MAPS, MAX_SAMPLES, fastest_plan, simulated_step_s

H100S = ClusterConfig(device="h100", num=4)


def config_of(**rollout: int) -> Any:
    tree = {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "runtime": {"kind": "ray"},
        "cluster": {"device": "h100", "num": 4},
        "policy": {"model": "Qwen/Qwen3-0.6B", "devices": "auto", "strategy": {"kind": "fsdp2"}},
        "engine": {"kind": "vllm", "devices": "auto"},
        "data": {"train": [{"kind": "jsonl", "path": "p.jsonl"}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"prompts_per_step": 16, "group_size": 4, "max_prompt_tokens": 256, "max_tokens": 2048, **rollout},
    }
    return parse_config(tree, runs_here=False)


def test_with_a_staleness_budget_the_map_is_the_fastest_as_simulated_the_same_each_time() -> None:
    config = config_of(max_staleness=1)
    plans = ranked_plans(config, H100S)[:MAX_MAPS]
    seconds = [simulated_step_s(plan) for plan in plans]
    chosen = fastest_plan(config, H100S)
    assert len(set(seconds)) > 1
    assert chosen.config == plans[seconds.index(min(seconds))].config
    assert assign_devices(config, num_gpus=4) == chosen.config


@pytest.mark.parametrize("rollout", [{"max_staleness": 0}, {"max_staleness": 1, "prompts_per_step": MAX_SAMPLES}])
def test_steps_that_do_not_overlap_or_are_too_large_are_left_to_the_planner(rollout: dict[str, int]) -> None:
    config = config_of(**rollout)
    assert fastest_plan(config, H100S).config == best_plan(config, H100S).config
