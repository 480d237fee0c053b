"""Seconds that the phases of a step take, from the work in them and what a device can do.

Work is counted (FLOPs, bytes read, bytes sent); what share of its peak a device reaches is assumed, in `plan/cluster.py`.
Good for comparing maps and for a first guess; the run's own `time/…` metrics are the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.memory import CODE_BYTES, FP32_BYTES, Training, host_memory
from reroll_zoo.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one step as they are expected to be, mean lengths in tokens."""

    num_rows: int
    prompt_tokens: float
    written_tokens: float
    longest_written: int
    num_prompts: int

    @property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.written_tokens

    @property
    def num_tokens(self) -> float:
        """What a pass over all rows computes: a prompt once for all that answer it."""
        return self.num_prompts * self.prompt_tokens + self.num_rows * self.written_tokens


def forward_flops(shape: ModelShape, *, num_tokens: float, row_tokens: float, with_head: bool = True) -> float:
    """Of a pass over rows of this length: two per parameter and token, and attention to half of the row."""
    body = shape.num_active_parameters if with_head else shape.body_parameters
    attention = 4 * shape.num_layers * shape.query_width * row_tokens / 2
    return num_tokens * (2 * body + attention)


def train_flops(shape: ModelShape, how: Training, rows: Rows) -> float:
    """Forward and backward. Checkpointing runs the layers once more; the chunked head always does. With an adapter, the
    frozen weights need no gradient of their own."""
    body = forward_flops(shape, num_tokens=rows.num_tokens, row_tokens=rows.row_tokens, with_head=False)
    head = rows.num_tokens * 2 * shape.head_parameters if how.has_language_head else 0.0
    backward = 1 if how.lora_parameters else 2
    return body * (1 + backward + how.checkpointing) + head * (2 + backward)


def peak_flops(cluster: ClusterConfig, value_bytes: int) -> float:
    """Of one device in this precision."""
    return (cluster.spec.fp32_tflops if value_bytes == FP32_BYTES else cluster.spec.bf16_tflops) * 1e12


def train_seconds(shape: ModelShape, how: Training, rows: Rows, cluster: ClusterConfig, *, num_devices: int) -> float:
    """One pass over the rows with gradients: computing, or exchanging parameters and gradients if that takes longer."""
    compute_s = train_flops(shape, how, rows) / (num_devices * peak_flops(cluster, how.value_bytes) * cluster.efficiency.train)
    tokens_per_rank = rows.num_tokens / (num_devices // how.tp)
    return max(
        compute_s, _shard_seconds(shape, how, tokens_per_rank, cluster, num_devices=num_devices, passes=3)
    ) + _exchange_seconds(shape, how, tokens_per_rank, cluster, passes=2)


def optimizer_seconds(shape: ModelShape, how: Training, cluster: ClusterConfig) -> float:
    """Taking masters and moments through a device, where they lie on its host: in and out go beside each other."""
    num_bytes = sum(host_memory(shape, how).values())
    return num_bytes / (cluster.spec.host_gb_s * 1e9 * cluster.efficiency.link)


def answer_seconds(shape: ModelShape, how: Training, rows: Rows, cluster: ClusterConfig, *, num_devices: int) -> float:
    """One pass over the rows without gradients."""
    flops = forward_flops(shape, num_tokens=rows.num_tokens, row_tokens=rows.row_tokens, with_head=how.has_language_head)
    compute_s = flops / (num_devices * peak_flops(cluster, how.value_bytes) * cluster.efficiency.prefill)
    tokens_per_rank = rows.num_tokens / (num_devices // how.tp)
    return max(
        compute_s, _shard_seconds(shape, how, tokens_per_rank, cluster, num_devices=num_devices, passes=1)
    ) + _exchange_seconds(shape, how, tokens_per_rank, cluster, passes=1)


def _shard_seconds(
    shape: ModelShape, how: Training, tokens_per_rank: float, cluster: ClusterConfig, *, num_devices: int, passes: int
) -> float:
    """Putting sharded layers together for each micro-batch, and spreading gradients: `passes` times the parameters."""
    if not how.shards or how.shards == 1:
        return 0.0
    num_micro_batches = math.ceil(tokens_per_rank / how.micro_batch_tokens)
    crosses = num_devices > cluster.num  # Then every node takes in the whole model once, and hands it on inside.
    experts, expert_shards = shape.all_expert_parameters, how.shards // how.ep
    gathered = (shape.num_parameters - experts) * (how.shards - 1) / how.shards
    gathered += experts * (expert_shards - 1) / expert_shards / (1 if crosses else how.ep)
    sent = passes * gathered * how.value_bytes
    seconds = sent / (cluster.network_gb_s * 1e9) if crosses else sent / how.tp / (cluster.spec.link_gb_s * 1e9)
    return num_micro_batches * seconds / cluster.efficiency.link


def _exchange_seconds(
    shape: ModelShape, how: Training, tokens_per_rank: float, cluster: ClusterConfig, *, passes: int
) -> float:
    """What ranks that work on the same layer or sequence tell each other, in each layer of each pass.

    Those of a layer add up hidden states twice; those of a sequence swap queries, keys and values for heads, and outputs back;
    those of experts send a token to each of its own, and back.
    """
    of_layers = 2 * shape.hidden * 2 * (how.tp - 1) / how.tp
    of_sequences = 2 * (shape.query_width + shape.kv_width) / how.tp * (how.sp - 1) / how.sp
    of_experts = 2 * shape.experts_per_token * shape.hidden * (how.ep - 1) / how.ep * shape.num_sparse_layers / shape.num_layers
    sent = passes * shape.num_layers * tokens_per_rank * how.value_bytes * (of_layers + of_sequences + of_experts)
    return sent / (cluster.spec.link_gb_s * 1e9 * cluster.efficiency.link)


def generate_seconds(
    shape: ModelShape,
    rows: Rows,
    cluster: ClusterConfig,
    *,
    value_bytes: int,
    num_workers: int,
    tp: int,
    max_running: int,
    in_fp8: bool = False,
) -> float:
    """Reading the prompts once per group, then a token for all that runs in each step, until the longest is written.

    A step reads the weights and the cache of what runs, or computes, if that takes longer.
    """
    efficiency, spec = cluster.efficiency, cluster.spec
    prompts = rows.num_prompts * rows.prompt_tokens / num_workers
    read_flops = forward_flops(shape, num_tokens=prompts, row_tokens=rows.prompt_tokens, with_head=False)
    prefill_s = read_flops / (tp * peak_flops(cluster, value_bytes) * efficiency.prefill)

    num_rows = math.ceil(rows.num_rows / num_workers)
    written = num_rows * rows.written_tokens
    num_steps = max(rows.longest_written, written / min(max_running, num_rows))
    running = written / num_steps
    context = rows.prompt_tokens + rows.written_tokens / 2
    weights = shape.expected_read_parameters(running) * value_bytes
    if in_fp8:
        weights -= shape.linear_parameters * (value_bytes - CODE_BYTES)
    read_s = (weights + running * context * shape.kv_bytes_per_token(value_bytes)) / (
        tp * spec.bandwidth_gb_s * 1e9 * efficiency.decode
    )
    flops = forward_flops(shape, num_tokens=running, row_tokens=2 * context)
    compute_s = flops / (tp * peak_flops(cluster, value_bytes) * efficiency.prefill)
    return prefill_s + num_steps * (max(read_s, compute_s) + efficiency.step_overhead_ms / 1e3)
