"""What a run asks the planner (`reroll.pipeline.planner.Planner`): a map for `auto`, and what will not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ModelError, Violation
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.here import host_memory_bytes
from reroll_zoo.plan.memory import GIB
from reroll_zoo.plan.plan import Plan, cluster_here
from reroll_zoo.plan.search import best_plan, device_violations, has_open_optimizer, is_open, trained_models
from reroll_zoo.ray.config import RayRuntimeConfig

C = TypeVar("C", bound=PipelineConfig)


def assign_devices(config: C, *, num_gpus: int) -> C:
    """The config with a map in the place of `auto`, and optimizers on the host where they do not fit beside their models. Where
    the model's sizes are not known, it is left as it is."""
    if not num_gpus:
        return config
    if not isinstance(config, RlvrConfig) or not is_open(config):
        return _with_optimizers_placed(config)
    cluster = cluster_here(config) or ClusterConfig(num=num_gpus)
    if cluster.num_devices != num_gpus:
        cluster = cluster.model_copy(update={"num": num_gpus, "nodes": 1})
    from reroll_zoo.simulate.maps import fastest_plan  # It loads the router, which a config without `auto` does not need.

    try:
        planned = fastest_plan(config, cluster).config
    except ModelError:
        return config
    assert isinstance(planned, type(config))
    return planned


def _with_optimizers_placed(config: C) -> C:
    if not any(has_open_optimizer(model) for model in trained_models(config).values()):
        return config
    try:
        cluster = cluster_here(config)
        planned = config if cluster is None else best_plan(config, _usual(cluster)).config
    except ModelError:
        return config
    assert isinstance(planned, type(config))
    return planned


def _usual(cluster: ClusterConfig) -> ClusterConfig:
    """With contexts in an engine's cache as they usually are."""
    return cluster.model_copy(
        update={"efficiency": cluster.efficiency.model_copy(update={"context": cluster.efficiency.length})}
    )


def memory_violations(config: PipelineConfig) -> tuple[list[Violation], list[str]]:
    """Devices that cannot hold the config's models and their optimizers; and notes on those that may be too small for what
    comes on top. What is not known of the devices is let pass.

    Activations and caches are reckoned from above, so a run that is too large by them may still go well.
    """
    try:
        cluster = cluster_here(config)
        if cluster is None or cluster.has_only_cpus:
            return [], []
        plan = best_plan(config, _usual(cluster))
    except ModelError:
        return [], []
    if too_small := list(_host_violations(plan)):
        return too_small, []
    found = device_violations(plan)
    if plan.is_certain_to_overflow:
        return found, []
    return [], [f"{violation.path}: {violation.problem}: if memory runs out, {violation.fix}" for violation in found]


def _host_violations(plan: Plan) -> Iterator[Violation]:
    """Optimizers that the memory of this machine cannot hold, where it is the one that the run is on."""
    room = host_memory_bytes()
    if isinstance(plan.config.cluster, ClusterConfig) or isinstance(plan.config.runtime, RayRuntimeConfig) or room is None:
        return
    kept = {role: sum(role.host.values()) for role in plan.roles if role.host}
    if sum(kept.values()) > room:
        role = max(kept, key=kept.__getitem__)
        yield Violation(
            f"{role.path}.strategy.optimizer",
            f"{sum(kept.values()) / GIB:.1f} GiB of masters and moments would lie in the memory of this machine, which has "
            f"{room / GIB:.1f} GiB",
            "train an adapter (lora) or a smaller model, or cut it over more devices (strategy.kind=fsdp2)",
        )
