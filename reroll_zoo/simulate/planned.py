"""A run that nobody has made yet: the planner's cost model says what engines, trainer and push take."""

from __future__ import annotations

from collections.abc import Callable

from reroll.config.tree import RlvrConfig
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.plan import Plan
from reroll_zoo.plan.roles import Role, engine_of
from reroll_zoo.plan.search import best_plan
from reroll_zoo.plan.timing import forward_flops, peak_flops
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.run import System
from reroll_zoo.simulate.workload import Workload, env_slots, parse_drawn, streams_from


def default_workload(config: RlvrConfig, cluster: ClusterConfig, *, lengths: str | None = None) -> Workload:
    """Lengths with a tail, of the mean that the planner reckons with, cut at `rollout.max_tokens`."""
    rollout, share = config.rollout, cluster.efficiency.length
    drawn = lengths or f"lognormal:{share * rollout.max_tokens:g},0.7"
    return Workload(
        lengths=parse_drawn(drawn, salt=1, name="--lengths", most=rollout.max_tokens),
        prompt_tokens=share * rollout.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        env_slots=env_slots(config),
    )


def planned_system(config: RlvrConfig, cluster: ClusterConfig, workload: Workload) -> tuple[System, Plan]:
    """The fastest map that fits, as `reroll plan` finds it, and what its parts take."""
    plan = best_plan(config, cluster)
    engine = engine_of(plan.roles)
    assert engine is not None
    assert isinstance(plan.config, RlvrConfig)
    rollout = plan.config.rollout
    update_s = sum(bar.seconds for bar in plan.bars if bar.phase in ("train", "score"))
    share = cluster.efficiency.length
    longest = plan.roles[0].how.longest
    written = share * max(1, longest - rollout.max_prompt_tokens)
    planned_tokens = rollout.prompts_per_step * (share * rollout.max_prompt_tokens + rollout.group_size * written)
    part = cluster.part(engine.devices)
    read_s = forward_flops(engine.shape, num_tokens=1, row_tokens=workload.prompt_tokens, with_head=False) / (
        engine.tp * peak_flops(part, engine.how.value_bytes) * part.efficiency.prefill
    )
    model = EngineModel(
        decode_s=decode_time(engine, part, context=workload.prompt_tokens + workload.lengths.mean / 2),
        prefill_s=read_s,
        max_running=engine.max_running,
        report_every=plan.config.engine.report_every,
        load_s=plan.seconds("push"),
    )
    policy = plan.roles[0]
    on_cpu = engine.devices == policy.devices == ("cpu",)
    devices = {device for role in plan.roles for device in role.devices}
    system = System(
        engine=model,
        engine_seats=engine.ranks,
        policy_seats=policy.ranks,
        train_s=0.0,
        train_token_s=update_s / planned_tokens,
        streams_from=streams_from(plan.config, num_ranks=len(policy.ranks)),
        sharing=float(on_cpu),
        num_devices=len(devices),
    )
    return system, plan


def decode_time(engine: Role, cluster: ClusterConfig, *, context: float) -> Callable[[int], float]:
    """Seconds of a step: it reads the weights and the cache of what runs, or computes, if that takes longer."""
    size, efficiency = engine.how.value_bytes, cluster.efficiency
    bandwidth = engine.tp * cluster.spec.bandwidth_gb_s * 1e9 * efficiency.decode
    flops = engine.tp * peak_flops(cluster, size) * efficiency.prefill
    known: dict[int, float] = {}

    def seconds(num: int) -> float:
        if num not in known:
            cache = num * context * engine.shape.kv_bytes_per_token(size)
            read_s = (engine.shape.expected_read_parameters(num) * size + cache) / bandwidth
            compute_s = forward_flops(engine.shape, num_tokens=num, row_tokens=2 * context) / flops
            known[num] = max(read_s, compute_s) + efficiency.step_overhead_ms / 1e3
        return known[num]

    return seconds
