"""The audit of a run's folder: of its journal, and of its metrics by its journal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import yaml

from reroll.errors import RunFolderError
from reroll.observe.files import read_jsonl
from reroll.observe.journal import Event, SampleState
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.pipeline.resume import read_state
from reroll.pipeline.rlvr import rollout_stats
from reroll_zoo.audit.audit import MAX_TOLD, Audit, audit, counted_events
from reroll_zoo.replay.recorded_steps import RecordedGroup, read_groups, trained_groups

_COUNTED = (SampleState.TRAINED, SampleState.FILTERED, SampleState.ABORTED, SampleState.FAILED)
_OF_A_STEP = "reward/mean"
"""What rows of steps have, and those of evaluations and checkpoints have not."""


def audit_run(run: RunFolder, *, on_segment: Callable[[], None] = lambda: None) -> Audit:
    """What a run's journal proves, and whether its metrics say the same. Raises RunFolderError where there is no journal."""
    if not run.journal_path.is_dir():
        raise RunFolderError(f"{run.path} has no journal: it was not sampled by reroll, or by an earlier version")
    config = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    found = audit(
        run.journal_path,
        max_staleness=config["rollout"]["max_staleness"],
        num_domains=len({source.get("domain") for source in config["data"]["train"]}),
        owed={checkpoint.step: owed for checkpoint in run.all_checkpoints() if (owed := _owed_by(checkpoint)) is not None},
        defers=config["rollout"].get("long_rounds", False),  # Earlier versions have it not.
        on_segment=on_segment,
    )
    if not found.violations and run.metrics_path.exists():
        _compare_metrics(run, found)
    return found


def _owed_by(checkpoint: Checkpoint) -> Set[int] | None:
    """Numbers of the groups that were drawn and neither trained on nor dropped; None if it does not tell."""
    try:
        queue = read_state(checkpoint)["pipeline"]["rollouts"]["queue"]
    except (RunFolderError, KeyError):  # Damaged, or of an earlier version: a resume would say so.
        return None
    return {row["number"] for row in queue if row["number"] is not None}


def _compare_metrics(run: RunFolder, found: Audit) -> None:
    rows = [row for row in read_jsonl(run.metrics_path) if _OF_A_STEP in row]
    by_step = {row["step"]: row for row in rows}
    violations = [f"step {step} has {num} rows" for step, num in Counter(row["step"] for row in rows).items() if num > 1]
    first_step = None
    for step, expected in journal_metrics(run.journal_path):
        first_step = step if first_step is None else first_step
        row = by_step.pop(step, None)  # None: it was killed, or the disk was full, right after the step.
        if row is None:
            continue
        found.num_metric_rows += 1
        for name, value in expected.items():
            if name in row:
                found.num_metric_values += 1
                if not _is_same(row[name], value):
                    violations.append(f"step {step} says {name} {row[name]}, and its samples {value}")
    if first_step is not None:  # A journal that was deleted begins later than its run.
        violations += [f"step {step} has a row, and the journal does not know of it" for step in by_step if step > first_step]
    found.violations += [f"metrics: {violation}" for violation in violations[:MAX_TOLD]]
    if len(violations) > MAX_TOLD:
        found.violations.append(f"metrics: {len(violations) - MAX_TOLD:,} more")


def journal_metrics(journal: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The metrics of each step that the journal's events and samples give: how samples ended, how old they were, and, where
    their tokens are kept, all that is said of rewards, lengths and episodes."""
    counts: Counter[str] = Counter()

    events = counted_events(journal)

    def counted() -> Iterator[Event]:
        for event in events:
            _count(event, counts)
            yield event

    for step, trained in trained_groups(counted()):
        metrics: dict[str, float] = {f"rollout/{state}_samples": counts[state] for state in _COUNTED}
        metrics |= {name: counts[name] for name in ("rollout/continued_tokens", "rollout/replayed_samples")}
        if step > events.found.num_cut_steps:
            yield step, metrics | _staleness(step, list(trained.values())) | _of_samples(step, trained)
        counts.clear()


def _count(event: Event, counts: Counter[str]) -> None:
    if event.state in _COUNTED:
        counts[event.state] += 1
    elif event.state == SampleState.GENERATING:
        counts["rollout/continued_tokens"] += event.detail.get("kept", 0)
        counts["rollout/replayed_samples"] += "reason" in event.detail and "discarded" not in event.detail


def _staleness(step: int, groups: list[RecordedGroup]) -> dict[str, float]:
    ages = [step - 1 - group.version for group in groups]
    return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": max(ages)} if ages else {}


def _of_samples(step: int, trained: Mapping[int, RecordedGroup]) -> dict[str, float]:
    try:
        groups = read_groups(trained, step=step)
    except RunFolderError:  # Their tokens were deleted: the audit counts them.
        return {}
    return rollout_stats(groups).values_by_name() if groups else {}


def _is_same(logged: float | None, value: float) -> bool:
    if logged is None:  # What JSON has no number for.
        return not math.isfinite(value)
    return math.isclose(logged, value, rel_tol=1e-9, abs_tol=1e-12)
