"""What the planner makes of sequences that several ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reroll.config.host import parse_devices
from reroll.config.load import load_config
from reroll.config.tree import RlvrConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.plan.cluster import ClusterConfig, EfficiencyConfig
from reroll_zoo.plan.memory import Training
from reroll_zoo.plan.plan import Plan, make_plan
from reroll_zoo.plan.search import candidates
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.plan.timing import Rows, train_seconds

EXAMPLE = Path(__file__).parents[4] / "examples" / "clusters" / "qwen3_8b_long.yaml"
LONGEST = 1024 + 32768


def config_of(*overrides: str) -> RlvrConfig:
    config = load_config(EXAMPLE, list(overrides), runs_here=False)
    assert isinstance(config, RlvrConfig)
    return config


def plan_of(*overrides: str) -> Plan:
    config = config_of(*overrides)
    return make_plan(config, config.cluster or ClusterConfig())


def activations(plan: Plan) -> int:
    return plan.roles[0].memory.working["activations"]


def test_a_rank_holds_its_part_of_the_longest_row_and_of_a_row_that_it_has_alone_all() -> None:
    shared, alone = plan_of(), plan_of("policy.strategy.sp=1")
    assert shared.fits
    assert not alone.fits
    assert activations(alone) == 8 * activations(shared)
    # Below the budget of a micro-batch there is nothing left to share: rows are then put together.
    assert activations(plan_of("rollout.max_tokens=2048")) == activations(shared) * 4224 * 8 // LONGEST


def test_parameters_are_cut_over_ranks_that_share_sequences_too() -> None:
    assert plan_of().roles[0].memory.held == plan_of("policy.strategy.sp=1").roles[0].memory.held


def test_sharing_costs_an_exchange_of_queries_keys_values_and_outputs_in_every_layer_of_both_passes() -> None:
    shape = shape_of("meta-llama/Llama-3.1-8B-Instruct")
    cluster = ClusterConfig(device="h100", num=8, efficiency=EfficiencyConfig(train=1, prefill=1, link=1))
    rows = Rows(num_rows=8, prompt_tokens=500, written_tokens=1500, longest_written=2500, num_prompts=8)

    def seconds(**how: Any) -> float:
        training = Training(value_bytes=2, micro_batch_tokens=8192, shards=8, **how)
        return train_seconds(shape, training, rows, cluster, num_devices=8)

    # 16000 tokens on 8 ranks, 32 layers, queries and outputs of 4096, keys and values of 1024; three quarters leave.
    sent = 2 * 32 * 2000 * 2 * (2 * 4096 + 2 * 1024) * 3 / 4
    assert seconds(sp=4) - seconds() == pytest.approx(sent / 450e9, rel=1e-3)


def test_maps_that_are_tried_leave_room_for_the_shares() -> None:
    config = config_of("policy.devices=auto", "policy.strategy.sp=4")
    policies = [found.policy for found in candidates(config, ClusterConfig(device="h100", num=8))]
    assert policies
    for policy in policies:
        assert isinstance(policy.strategy, Fsdp2StrategyConfig)
        assert policy.strategy.sp == 4
        assert len(parse_devices(policy.devices)) % policy.strategy.ranks_per_share == 0
        assert 32 % policy.strategy.ranks_per_share == 0
