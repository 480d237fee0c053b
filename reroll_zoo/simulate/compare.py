"""Runs beside each other: one setting varied, several varied, a search for the cheapest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from reroll.config.parts import RolloutConfig
from reroll_zoo.simulate.recorded import RecordedRun
from reroll_zoo.simulate.run import Prediction, System, simulate
from reroll_zoo.simulate.workload import Workload

SEARCHED: Mapping[str, Sequence[str]] = {
    "rollout.max_staleness": ("0", "1", "2", "4"),
    "rollout.take_window": ("1", "2"),
    "rollout.oversample": ("1.0", "1.25"),
}
"""What `--search` tries where nothing else is varied."""


@dataclass(frozen=True)
class Case:
    """One setting of a run."""

    label: str
    rollout: RolloutConfig
    workload: Workload
    system: System


@dataclass(frozen=True)
class Compared:
    """A setting and what came of it."""

    label: str
    outcome: Prediction


def cheapest(outcomes: Sequence[Compared]) -> Compared:
    """With the least cost per trained sample."""
    return min(outcomes, key=lambda one: one.outcome.device_s_per_sample)


def combinations(varied: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Overrides, one list for each combination of values."""
    for values in product(*varied.values()):
        yield [f"{key}={value}" for key, value in zip(varied, values, strict=True)]


def run_case(case: Case, *, num_steps: int, seed: int = 0) -> Compared:
    """Simulate one setting."""
    with tempfile.TemporaryDirectory(prefix="reroll-simulate-") as folder:
        outcome = simulate(case.rollout, case.workload, case.system, num_steps=num_steps, folder=Path(folder), seed=seed)
    return Compared(case.label, outcome)


def slowed(system: System, factor: float) -> System:
    """All of its work takes so many times as long."""
    decode_s: Callable[[int], float] = system.engine.decode_s
    engine = replace(system.engine, decode_s=lambda num: factor * decode_s(num), prefill_s=factor * system.engine.prefill_s)
    return replace(system, engine=engine, train_s=factor * system.train_s, train_token_s=factor * system.train_token_s)


def calibrated(run: RecordedRun) -> tuple[System, float]:
    """The run's machines, slowed or sped up until its own setting takes as long as it took; and the factor.

    What a run measured of its parts leaves out what the controller does in between, and on a CPU what they take from each
    other counts in both.
    """
    factor = 1.0
    num_steps = max(12, min(40, run.num_steps))
    for _ in range(3):
        case = Case("as recorded", run.config.rollout, run.workload, slowed(run.system, factor))
        seen_s = run_case(case, num_steps=num_steps).outcome.step_s
        if abs(seen_s / run.step_s - 1) < 0.01:
            break
        factor *= run.step_s / seen_s
    return slowed(run.system, factor), factor
