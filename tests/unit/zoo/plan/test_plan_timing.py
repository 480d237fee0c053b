"""The clock model: counted work over assumed speed, by hand."""

from __future__ import annotations

import pytest

from reroll_zoo.plan.cluster import DEVICES, ClusterConfig, EfficiencyConfig
from reroll_zoo.plan.memory import Training
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.plan.timing import (
    Rows,
    forward_flops,
    generate_seconds,
    train_flops,
    train_seconds,
)

SHAPE = shape_of("meta-llama/Llama-3.1-8B-Instruct")
HEAD = 128_256 * 4096
BODY = SHAPE.num_parameters - 2 * HEAD - 4096
"""Without embedding, head and last norm."""
ROWS = Rows(num_rows=512, prompt_tokens=500, written_tokens=1500, longest_written=2500, num_prompts=64)
PERFECT = EfficiencyConfig(train=1, prefill=1, decode=1, link=1, memory=1, length=1, step_overhead_ms=0)
NODE = ClusterConfig(device="h100", num=8, efficiency=PERFECT)


def test_a_forward_pass_is_two_flops_per_parameter_and_token_and_attention_to_half_the_row() -> None:
    attention = 4 * 32 * 4096 * 2000 / 2
    assert forward_flops(SHAPE, num_tokens=10, row_tokens=2000) == 10 * (2 * (BODY + HEAD) + attention)


def test_training_is_three_forward_passes_four_with_checkpoints_and_four_through_the_chunked_head() -> None:
    forward = forward_flops(SHAPE, num_tokens=ROWS.num_tokens, row_tokens=2000, with_head=False)
    head = ROWS.num_tokens * 2 * HEAD
    plain = Training(value_bytes=2, micro_batch_tokens=8192)
    assert train_flops(SHAPE, plain, ROWS) == pytest.approx(3 * forward + 4 * head)
    checkpointed = Training(value_bytes=2, micro_batch_tokens=8192, checkpointing=True)
    assert train_flops(SHAPE, checkpointed, ROWS) == pytest.approx(4 * forward + 4 * head)
    adapter = Training(value_bytes=2, micro_batch_tokens=8192, lora_parameters=1)
    assert train_flops(SHAPE, adapter, ROWS) == pytest.approx(2 * forward + 3 * head)


def test_twice_the_devices_halve_the_training_time_while_computing_is_what_takes_it() -> None:
    def seconds(num_devices: int, cluster: ClusterConfig) -> float:
        how = Training(value_bytes=2, micro_batch_tokens=8192, shards=num_devices)
        return train_seconds(SHAPE, how, ROWS, cluster, num_devices=num_devices)

    four, eight = seconds(4, NODE), seconds(8, NODE)
    assert four == pytest.approx(train_flops(SHAPE, Training(value_bytes=2, micro_batch_tokens=8192), ROWS) / 4 / 989e12)
    assert eight == pytest.approx(four / 2)
    slow_network = NODE.model_copy(update={"nodes": 2, "network_gb_s": 1.0})
    # 64 prompts of 500 and 512 answers of 1500 tokens are 50000 on each of 16 ranks: 7 micro-batches, each of which takes in
    # the model three times.
    assert seconds(16, slow_network) == pytest.approx(7 * 3 * SHAPE.num_parameters * 2 * 15 / 16 / 1e9)


def test_writing_reads_weights_and_cache_once_per_step_until_the_longest_is_done() -> None:
    rows = Rows(num_rows=8, prompt_tokens=0, written_tokens=1000, longest_written=1000, num_prompts=8)
    seconds = generate_seconds(SHAPE, rows, NODE, value_bytes=2, num_workers=1, tp=1, max_running=8)
    cache = 8 * 500 * SHAPE.kv_bytes_per_token(2)
    assert seconds == pytest.approx(1000 * (2 * SHAPE.num_active_parameters + cache) / 3350e9)
    halved = generate_seconds(SHAPE, rows, NODE, value_bytes=2, num_workers=1, tp=2, max_running=8)
    assert halved == pytest.approx(seconds / 2)
    in_two_waves = generate_seconds(SHAPE, rows, NODE, value_bytes=2, num_workers=1, tp=1, max_running=4)
    assert in_two_waves == pytest.approx(2 * seconds, rel=0.02)
    one_long = Rows(num_rows=8, prompt_tokens=0, written_tokens=1000, longest_written=4000, num_prompts=8)
    assert generate_seconds(SHAPE, one_long, NODE, value_bytes=2, num_workers=1, tp=1, max_running=8) > 3.5 * seconds


def test_a_device_may_be_described_by_its_numbers_and_an_unknown_name_is_refused_with_the_known_ones() -> None:
    mine = {"memory_gib": 24, "bf16_tflops": 100, "fp32_tflops": 50, "bandwidth_gb_s": 900, "link_gb_s": 25, "host_gb_s": 25}
    cluster = ClusterConfig.model_validate({"device": mine, "num": 2})
    assert cluster.spec.bandwidth_gb_s == 900
    with pytest.raises(ValueError, match="h100, h200"):
        ClusterConfig(device="h300")
    assert all(spec.name == name for name, spec in DEVICES.items())
