"""Fits what the planner assumes of devices to what was measured on them: a run's folder, or what `gpu_parts.py` saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from reroll.config.load import load_config
from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation
from reroll_zoo.plan.cluster import ClusterConfig, EfficiencyConfig
from reroll_zoo.plan.plan import Plan, make_plan
from reroll_zoo.plan.search import best_plan

PARTS = {"engine writes": "generate", "policy learns": "update"}
"""Rows of a benchmark's results, by what a step calls them."""
_WARM_STEPS = 2
_LEAST = 1e-6
"""Of a share of a device's peak: a model of a few thousand parameters does not come near to one."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What a step took, on average."""

    name: str
    config: PipelineConfig
    seconds: Mapping[str, float]
    """Of `generate`, `update` (training, and what is asked of models before) and `push`, as far as they were measured."""
    length: float
    """Mean length of what was written, as a share of what the config allows."""


def read_measured(source: Path, config: PipelineConfig) -> MeasuredStep:
    """Of a run's folder, with the config that it ran; or of a benchmark's results, whose work `config` describes: all its
    samples are as long as that allows. Raises ConfigError for what is neither."""
    if source.is_dir():
        return _of_run(source)
    try:
        rows = json.loads(source.read_text())["rows"]
        seconds = {PARTS[row["part"]]: float(row["wall_s"]) for row in rows if row.get("part") in PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(source, f"cannot be read ({error})") from error
    if not seconds:
        raise _refused(source, f"has no row whose part is {' or '.join(map(repr, PARTS))}")
    return MeasuredStep(name=source.name, config=config, seconds=seconds, length=1.0)


def _of_run(folder: Path) -> MeasuredStep:
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        raise _refused(folder, "has no config.yaml and metrics.jsonl")
    config = load_config(folder / "config.yaml", runs_here=False, is_of_run=True)
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    rows: list[dict[str, Any]] = [row for row in lines if "time/wait_s" in row and "engine/busy_s" in row][_WARM_STEPS:]
    if not isinstance(config, RlvrConfig) or not rows:
        raise _refused(folder, f"has no RL step after the first {_WARM_STEPS}")
    rollout = config.rollout
    num_engines = len(config.engine.ranks(("0",))) if config.engine.devices == "cpu" else config.engine.num_workers or 1
    written = mean(row["tokens"] for row in rows) / (rollout.prompts_per_step * rollout.group_size)
    return MeasuredStep(
        name=folder.name,
        config=config,
        seconds={
            "generate": mean(row["engine/busy_s"] for row in rows) / num_engines,
            "update": mean(row["time/step_s"] - row["time/wait_s"] - row["time/push_s"] for row in rows),
            "push": mean(row["time/push_s"] for row in rows),
        },
        length=min(1.0, max(_LEAST, written / rollout.max_tokens)),
    )


def _refused(source: Path, problem: str) -> ConfigError:
    fix = "give the folder of a run with a few steps, or what `benchmarks/gpu_parts.py --save` wrote"
    return ConfigError([Violation("--calibrate", f"{source} {problem}", fix)])


def planned_seconds(config: PipelineConfig, cluster: ClusterConfig) -> dict[str, float]:
    """The parts of a step by the names of `MeasuredStep`."""
    return _by_part(make_plan(config, cluster))


def _by_part(plan: Plan) -> dict[str, float]:
    update_s = plan.seconds("train") + plan.seconds("score")
    return {"generate": plan.seconds("generate"), "update": update_s, "push": plan.seconds("push")}


def fitted(measured: MeasuredStep, cluster: ClusterConfig) -> EfficiencyConfig:
    """With these, the plan of what was measured takes as long as that took.

    One measurement cannot tell a step's overhead from its reads: reads are taken to be slower, and only where even the
    bandwidth on the data sheet leaves less time, the overhead less. The engine's share of FLOP/s, of which nothing is
    measured alone, follows that of training where that is lower: on such a machine reads are not what an engine waits for.
    """
    config = best_plan(measured.config, cluster).config
    found = cluster.efficiency.model_copy(update={"length": measured.length})

    def seconds(part: str, key: str) -> Callable[[float], float]:
        def of(value: float) -> float:
            efficiency = found.model_copy(update={key: value})
            return planned_seconds(config, cluster.model_copy(update={"efficiency": efficiency}))[part]

        return of

    if "update" in measured.seconds:
        found = found.model_copy(update={"train": _share(seconds("update", "train"), measured.seconds["update"])})
        found = found.model_copy(update={"prefill": min(found.prefill, found.train)}) if found.train < _LOW else found
    if "generate" in measured.seconds:
        target_s, reads, overhead = measured.seconds["generate"], seconds("generate", "decode"), "step_overhead_ms"
        if reads(1.0) < target_s:
            return found.model_copy(update={"decode": _share(reads, target_s)})
        found = found.model_copy(update={"decode": 1.0})
        none_s, one_s = (seconds("generate", overhead)(value) for value in (0.0, 1.0))
        found = found.model_copy(update={overhead: max(0.0, (target_s - none_s) / (one_s - none_s))})
    return found


_LOW = 0.05


def _share(seconds: Callable[[float], float], target_s: float) -> float:
    """The share of a peak with which something takes so long; the nearest where none does. More of it is never slower."""
    low, high = _LEAST, 1.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > target_s else (low, middle)
    return float(f"{high:.4g}")


def fragment(cluster: ClusterConfig, efficiency: EfficiencyConfig) -> str:
    """The `cluster:` of a config, as YAML: the machines, and what was fitted."""
    tree = cluster.model_dump(mode="json", exclude_unset=True, exclude={"efficiency", "kind"})
    tree["device"] = cluster.device if isinstance(cluster.device, str) else cluster.device.model_dump(mode="json")
    if isinstance(cluster.nodes, list):
        del tree["device"]
    tree["efficiency"] = efficiency.model_dump(mode="json")
    return yaml.safe_dump({"cluster": tree}, sort_keys=False)


def as_override(file: Path) -> str:
    """What such a file says, as an override of a config."""
    try:
        tree = yaml.safe_load(file.read_text())
        return f"cluster={json.dumps(tree['cluster'])}"
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        fix = "give a file that `reroll plan --calibrate … --save FILE` wrote"
        raise ConfigError([Violation("--cluster", f"{file} has no cluster ({error})", fix)]) from error
