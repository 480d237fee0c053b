"""What a run asks the planner (`reroll.pipeline.planner.Planner`): a map for `auto`, and what will not fit."""

from __future__ import annotations

from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ModelError, Violation
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.plan import cluster_here
from reroll_zoo.plan.search import best_plan, device_violations, is_open


def assign_devices(config: RlvrConfig, *, num_gpus: int) -> RlvrConfig:
    """The config with a map in the place of `auto`. Where the model's sizes are not known, it is left as it is."""
    if not num_gpus or not is_open(config):
        return config
    cluster = cluster_here(config) or ClusterConfig(num=num_gpus)
    if cluster.num_devices != num_gpus:
        cluster = cluster.model_copy(update={"num": num_gpus, "nodes": 1})
    from reroll_zoo.simulate.maps import fastest_plan  # It loads the router, which a config without `auto` does not need.

    try:
        planned = fastest_plan(config, cluster).config
    except ModelError:
        return config
    assert isinstance(planned, RlvrConfig)
    return planned


def memory_violations(config: PipelineConfig) -> tuple[list[Violation], list[str]]:
    """Devices that cannot hold the config's models and their optimizers; and notes on those that may be too small for what
    comes on top. What is not known of the devices is let pass.

    Activations and caches are reckoned from above, so a run that is too large by them may still go well.
    """
    try:
        cluster = cluster_here(config)
        if cluster is None or cluster.has_only_cpus:
            return [], []
        usual = cluster.efficiency.model_copy(update={"context": cluster.efficiency.length})
        plan = best_plan(config, cluster.model_copy(update={"efficiency": usual}))
    except ModelError:
        return [], []
    found = device_violations(plan)
    if any(load.num_certain_bytes > cluster.memory_bytes_of(load.device) for load in plan.overfull):
        return found, []
    return [], [f"{violation.path}: {violation.problem}: if memory runs out, {violation.fix}" for violation in found]
