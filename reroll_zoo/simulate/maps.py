"""Which of the planner's maps is the fastest where engines write while the policy is trained: the planner reckons with one step
of mean lengths, and knows neither stragglers nor what waits in the next step."""

from __future__ import annotations

from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.plan import Plan
from reroll_zoo.plan.search import ranked_plans
from reroll_zoo.simulate.compare import Case, run_case
from reroll_zoo.simulate.planned import default_workload, planned_system

MAX_MAPS = 4
"""So many of the planner's fastest are simulated."""
NUM_STEPS = 6
MAX_SAMPLES = 1024
"""Of a step. A larger one would keep a run's start waiting for more than seconds, and is left to the planner."""


def fastest_plan(config: PipelineConfig, cluster: ClusterConfig) -> Plan:
    """As `best_plan`, by the simulator among the fastest maps, if there is a staleness budget. The same each time."""
    plans = ranked_plans(config, cluster)[:MAX_MAPS]
    if len(plans) < 2 or not isinstance(config, RlvrConfig) or not is_worthwhile(config):
        return plans[0]
    return min(plans, key=simulated_step_s)


def is_worthwhile(config: RlvrConfig) -> bool:
    """Whether steps overlap, and are small enough to be simulated before a run starts."""
    rollout = config.rollout
    return rollout.max_staleness > 0 and rollout.prompts_per_step * rollout.group_size <= MAX_SAMPLES


def simulated_step_s(plan: Plan) -> float:
    """Of a few steps with the scheduler that would run them."""
    config = plan.config
    assert isinstance(config, RlvrConfig)
    workload = default_workload(config, plan.cluster)
    system, _ = planned_system(config, plan.cluster, workload)
    return run_case(Case("", config.rollout, workload, system), num_steps=NUM_STEPS).outcome.step_s
