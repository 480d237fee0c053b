"""`devices: auto`: tries maps with the planner's two models and takes the fastest that fits; says what to do if none does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from reroll.config.algorithm import OwnCriticConfig
from reroll.config.base import Node
from reroll.config.elastic import begin_elastic
from reroll.config.host import parse_devices
from reroll.config.parts import EngineConfig, LocalRuntimeConfig, ModelConfig, PolicyConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.strategy import RanksStrategyConfig, StrategyConfig, TorchStrategyConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.external_engine.config import ExternalEngineConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.memory import GIB
from reroll_zoo.plan.peaks import DeviceLoad
from reroll_zoo.plan.plan import Plan, make_plan
from reroll_zoo.plan.roles import Role, roles_of, torn_seat
from reroll_zoo.plan.shape import ModelShape, shape_of

C = TypeVar("C", bound=Node)
_NUM_FINE_STEPS = 8
"""Up to so many devices every split is tried; of more, those at powers of two and at whole nodes."""

_MIN_RUNNING = 8
"""An engine that decodes fewer sequences at once is not worth advising."""


def best_plan(config: PipelineConfig, cluster: ClusterConfig) -> Plan:
    """The fastest map that fits among those that the config leaves open with `auto`; if none fits, the one nearest to it."""
    return ranked_plans(config, cluster)[0]


def ranked_plans(config: PipelineConfig, cluster: ClusterConfig) -> list[Plan]:
    """All maps that fit, the fastest first; if none does, the one nearest to it."""
    if isinstance(config, RlvrConfig):
        num_gpus = 0 if cluster.has_only_cpus else cluster.num_devices
        config = begin_elastic(config, partial(parse_devices, num_gpus=num_gpus, nodes=cluster.gpu_nodes))
    plans = [_with_optimizers_placed(candidate, cluster) for candidate in candidates(config, cluster)]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return [min(plans, key=lambda plan: plan.fullest.num_bytes)]
    # Of equally fast ones the first: candidates begin with those that keep to few devices.
    return sorted(fitting, key=lambda plan: (round(plan.step_s, 6), len(plan.loads)))


def _with_optimizers_placed(config: PipelineConfig, cluster: ClusterConfig) -> Plan:
    """A map with the optimizers of `torch` on the host where they are left open, and that is what makes it fit: all of it, or
    what is certain. Else they stay beside their models, which is quicker."""
    plan = make_plan(config, cluster)
    opened = {name: model.strategy for name, model in trained_models(config).items() if has_open_optimizer(model)}
    if plan.fits or not opened or cluster.has_only_cpus:
        return plan
    moved = config
    for name in opened:
        moved = _with_key(moved, [name, "strategy", "optimizer"], "host")
    there = make_plan(moved, cluster)
    return there if there.fits or plan.is_certain_to_overflow else plan


def trained_models(config: PipelineConfig) -> dict[str, ModelConfig]:
    """The models that learn, by the keys of their nodes."""
    critic = config.critic if isinstance(config, RlvrConfig) else None
    return {"policy": config.policy} | ({"critic": critic} if isinstance(critic, OwnCriticConfig) else {})


def has_open_optimizer(model: ModelConfig) -> bool:
    """Whether it is left to the planner where the model's optimizer lies."""
    return isinstance(model.strategy, TorchStrategyConfig) and model.strategy.optimizer == "auto"


def candidates(config: PipelineConfig, cluster: ClusterConfig) -> Iterator[PipelineConfig]:
    """Every map to look at: the config itself with lists of devices, worker numbers and tp where it leaves them open."""
    roles_of(config, cluster)  # Raises for devices that there are not, before others are put in their place.
    if not isinstance(config, RlvrConfig) or not is_open(config) or cluster.has_only_cpus:
        yield config
        return
    shape = shape_of(config.policy.model)
    seen: set[str] = set()
    for policy in _policy_maps(config, cluster, shape):
        for engine in _engine_maps(config, cluster, shape, parse_devices(policy.devices, nodes=cluster.gpu_nodes)):
            candidate = _with_followers(_with(config, policy=policy, engine=engine))
            key = candidate.model_dump_json(include={"policy", "engine"})
            if key not in seen:
                seen.add(key)
                yield candidate


def device_violations(plan: Plan) -> list[Violation]:
    """What does not fit, with the sum, and what would."""
    if plan.fits:
        return []
    load = max(plan.overfull, key=lambda load: load.num_bytes)
    spec, room = plan.cluster.spec_of(load.device), plan.cluster.memory_bytes_of(load.device) / GIB
    problem = (
        f"device {load.device} would hold {load.num_bytes / GIB:.1f} GiB ({load.phase}): {_sum(load)}; "
        f"of the {spec.memory_gib:g} GiB of a {spec.name} {room:.1f} can be planned with"
    )
    return [Violation(f"{_heaviest(plan, load).path}.devices", problem, _fix(plan))]


def as_devices(devices: tuple[str, ...]) -> str | int | list[int]:
    """Device names as a config writes them: `3`, `0-3` or a list."""
    if devices == ("cpu",):
        return "cpu"
    indices = [int(device) for device in devices]
    if len(indices) == 1:
        return indices[0]
    return f"{indices[0]}-{indices[-1]}" if indices == list(range(indices[0], indices[-1] + 1)) else indices


def is_open(config: RlvrConfig) -> bool:
    """Whether a config leaves the devices of its policy or engine to the planner."""
    return "auto" in (config.policy.devices, config.engine.devices)


def _policy_maps(config: RlvrConfig, cluster: ClusterConfig, shape: ModelShape) -> Iterator[PolicyConfig]:
    policy, num = config.policy, cluster.num_devices
    strategy = policy.strategy
    if policy.devices != "auto":
        starts = [parse_devices(policy.devices, nodes=cluster.gpu_nodes)]
    elif isinstance(strategy, TorchStrategyConfig):
        starts = [("0",), (str(num - 1),)]
    else:
        starts = [_span(0, size) for size in _sizes(num, cluster.devices_per_node)]
        if config.engine.devices != "auto":
            taken = parse_devices(config.engine.devices, nodes=cluster.gpu_nodes)
            starts.append(tuple(device for device in _span(0, num) if device not in taken))
    for devices in starts:
        if not devices:
            continue
        if not isinstance(strategy, Fsdp2StrategyConfig):
            yield _with(policy, devices=as_devices(devices))
            continue
        ranks = strategy.num_ranks or len(devices)
        for tp in [strategy.tp] if "tp" in strategy.model_fields_set else _tp_sizes(shape, ranks, cluster):
            if _can_lay_out(strategy, shape, num_ranks=ranks, tp=tp):
                yield _with(policy, devices=as_devices(devices), strategy=_with(strategy, tp=tp))


def _can_lay_out(strategy: Fsdp2StrategyConfig, shape: ModelShape, *, num_ranks: int, tp: int) -> bool:
    """Whether so many ranks can hold a model with its layers cut by `tp`, which cuts no experts."""
    if num_ranks % (tp * strategy.sp * strategy.replicas) or shape.num_heads % (tp * strategy.sp):
        return False
    if tp > 1 and shape.num_sparse_layers:
        return False
    return num_ranks // (tp * strategy.replicas) % strategy.ep == 0


def _engine_maps(
    config: RlvrConfig, cluster: ClusterConfig, shape: ModelShape, policy: tuple[str, ...]
) -> Iterator[EngineConfig]:
    engine, num = config.engine, cluster.num_devices
    if engine.devices != "auto":
        options = [parse_devices(engine.devices, nodes=cluster.gpu_nodes)]
    else:
        others = tuple(device for device in _span(0, num) if device not in policy)
        options = [policy, others, _span(0, num)]
    for devices in options:
        tps = _engine_tps(engine, shape, devices, cluster) if isinstance(engine, ExternalEngineConfig) else [1]
        for tp in tps if devices else ():
            seats = len(devices) // tp
            # Threads of one process share one interpreter: more engines in it would wait for each other.
            may_grow = not isinstance(config.runtime, LocalRuntimeConfig) and "num_workers" not in engine.model_fields_set
            num_workers = seats if may_grow else engine.num_workers
            used = devices[: min(seats, num_workers) * tp] if engine.devices == "auto" else devices
            if engine.devices == "auto" and num_workers * tp % len(used):
                continue  # Some devices would carry more workers than others.
            changes: dict[str, Any] = {"devices": as_devices(used), "num_workers": num_workers}
            if isinstance(engine, ExternalEngineConfig):
                changes["tp"] = tp
            option = _with(engine, **changes)
            if not torn_seat(option.ranks(used), cluster):
                yield option


def _engine_tps(engine: ExternalEngineConfig, shape: ModelShape, devices: tuple[str, ...], cluster: ClusterConfig) -> list[int]:
    if "tp" in engine.model_fields_set:
        return [engine.tp]
    return _tp_sizes(shape, len(devices), cluster)


def _tp_sizes(shape: ModelShape, num_devices: int, cluster: ClusterConfig) -> list[int]:
    """Into how many parts the layers can be cut: whole heads, inside one node, and no device left over."""
    most = math.gcd(shape.num_heads, shape.num_kv_heads)
    return [
        tp for tp in range(1, min(most, cluster.devices_per_node, num_devices) + 1) if most % tp == 0 and num_devices % tp == 0
    ]


def _sizes(num: int, per_node: int) -> list[int]:
    if num <= _NUM_FINE_STEPS:
        return list(range(1, num + 1))
    powers = {2**power for power in range(num.bit_length()) if 2**power <= num}
    return sorted(powers | set(range(per_node, num + 1, per_node)))


def _with_followers(config: RlvrConfig) -> RlvrConfig:
    """Critics, teachers and hosted judges that are `auto` go where the policy is."""
    devices = config.policy.devices
    changes: dict[str, Any] = {}
    if isinstance(config.critic, OwnCriticConfig) and config.critic.devices == "auto":
        changes["critic"] = _with(config.critic, devices=devices)
    teachers = {name: _with(one, devices=devices) for name, one in config.teachers.items() if one.devices == "auto"}
    return _with(config, **changes, teachers={**config.teachers, **teachers})


def _span(start: int, end: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(start, end))


def _with(node: C, **changes: Any) -> C:
    return node.model_copy(update=changes)


def _heaviest(plan: Plan, load: DeviceLoad) -> Role:
    """The role that holds most of what a device holds."""
    return max(plan.roles, key=lambda role: sum(term.num_bytes for term in load.terms if term.role == role.name))


def _sum(load: DeviceLoad) -> str:
    """The terms, largest first; small ones together."""
    terms = sorted(load.terms, key=lambda term: -term.num_bytes)
    large = [term for term in terms if term.num_bytes >= load.num_bytes / 50]
    parts = [f"{term.role} {term.name} {term.num_bytes / GIB:.1f}" for term in large]
    rest = sum(term.num_bytes for term in terms[len(large) :])
    return " + ".join([*parts, *([f"others {rest / GIB:.1f}"] if rest else [])])


def _fix(plan: Plan) -> str:
    """The single changes that would make it fit; else the first few that do together; else how far all would bring it."""
    cluster, longest = plan.cluster, plan.roles[0].how.longest
    single = _remedies(plan.config, cluster, longest)
    found = [f"{key}={value}" for key, (value, changed) in single.items() if make_plan(changed, cluster).fits]
    if found:
        return f"any one of these fits: {'; '.join(found)}"
    config, done = plan.config, []
    for key in single:
        value, config = _remedies(config, cluster, longest)[key]
        done.append(f"{key}={value}")
        if make_plan(config, cluster).fits:
            return f"together these fit: {'; '.join(done)}"
    least = make_plan(config, cluster).fullest.num_bytes / cluster.efficiency.memory / GIB
    return (
        f"even with {', '.join(done)} it needs devices of {math.ceil(least)} GiB: cut the model over more of them "
        "(strategy.kind=fsdp2 and more devices; engine.kind=vllm and engine.tp), let ranks share long "
        "rows (strategy.sp), train an adapter (lora), or take a smaller model"
    )


def _remedies(config: PipelineConfig, cluster: ClusterConfig, longest: int) -> dict[str, tuple[str, PipelineConfig]]:
    """Changes that save memory, by the key to set: the value, and the config with it. The cheapest in time come first.

    Of numbers, the largest of their halves that fits, else the smallest that works at all.
    """
    changes: list[tuple[str, Sequence[Any]]] = []
    if isinstance(config, RlvrConfig):
        changes += [("engine.sleep", [True])] if not config.engine.sleep else []
        changes += [("policy.swap", ["optimizer"])] if config.policy.swap == "none" else []
    for name, model in trained_models(config).items():
        changes += _strategy_changes(f"{name}.strategy", model.strategy, longest)
    if isinstance(config, RlvrConfig) and isinstance(config.engine, ExternalEngineConfig):
        shares = [share / 20 for share in range(19, 3, -1) if share / 20 < config.engine.gpu_memory_utilization]
        changes.append(("engine.gpu_memory_utilization", shares))
    elif isinstance(config, RlvrConfig):
        changes.append(("engine.max_running", _halves(config.engine.max_running, at_least=_MIN_RUNNING)))
    found = {}
    for key, values in changes:
        options = [(str(value).lower(), _with_key(config, key.split("."), value)) for value in values]
        if options:
            fitting = (option for option in options if make_plan(option[1], cluster).fits)
            found[key] = next(fitting, options[-1])
    return found


def _strategy_changes(path: str, strategy: StrategyConfig, longest: int) -> Iterator[tuple[str, Sequence[Any]]]:
    sp = strategy.sp if isinstance(strategy, Fsdp2StrategyConfig) else 1
    yield f"{path}.micro_batch_tokens", _halves(strategy.micro_batch_tokens, at_least=-(-longest // sp))
    if not strategy.gradient_checkpointing:
        yield f"{path}.gradient_checkpointing", [True]
    if strategy.precision == "fp32":
        yield f"{path}.precision", ["bf16"]
    if isinstance(strategy, TorchStrategyConfig) and strategy.optimizer != "host":
        yield f"{path}.optimizer", ["host"]
    if isinstance(strategy, RanksStrategyConfig) and not strategy.cpu_offload:
        yield f"{path}.cpu_offload", [True]


def _halves(value: int, *, at_least: int) -> list[int]:
    """A number's half, a quarter, … down to the least that makes sense."""
    found = []
    while value > at_least:
        value = max(at_least, value // 2)
        found.append(value)
    return found


def _with_key(node: C, keys: list[str], value: Any) -> C:
    """The node with the field at a dotted path changed."""
    head, *rest = keys
    return _with(node, **{head: _with_key(dict(node)[head], rest, value) if rest else value})
