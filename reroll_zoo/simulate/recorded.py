"""A run as its folder tells it: lengths, latencies, failures, and how long its engines and its trainer took."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from reroll.config.host import parse_devices
from reroll.config.load import load_config
from reroll.config.strategy import RanksStrategyConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import RunFolderError
from reroll.observe.journal import JOURNAL_FOLDER, Event, SampleState, read_journal, read_stored
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.run import System
from reroll_zoo.simulate.workload import Workload, empirical, env_slots, fixed, streams_from

MIN_SPREAD = 0.1
"""Of what varies from step to step, against its mean: the deviation below which a slope is noise."""
MAX_SAMPLES = 20_000
"""Whose tokens are read: the newest."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What was learned from it."""

    config: RlvrConfig
    workload: Workload
    system: System
    step_s: float
    """As it was: of a step, on average."""
    num_steps: int

    def asked(self, config: RlvrConfig) -> tuple[Workload, System]:
        """Its samples and its machines, as another setting has them. No completion is longer than the run's longest."""
        workload = replace(
            self.workload, max_tokens=min(self.workload.max_tokens, config.rollout.max_tokens), env_slots=env_slots(config)
        )
        system = replace(
            self.system,
            engine=replace(self.system.engine, max_running=config.engine.max_running),
            engine_seats=_seats(config)[0],
            streams_from=_streams_from(config),
        )
        return workload, system


def read_run(folder: Path, *, skip: int = 1, until: int | None = None) -> RecordedRun:
    """Raises RunFolderError where there is too little to learn from. The first steps, in which things warm up, are passed, and
    the times of those after `until`."""
    config = load_config(folder / "config.yaml", runs_here=False, is_of_run=True)
    if not isinstance(config, RlvrConfig):
        raise RunFolderError(f"{folder} is no RL run: only those have a rollout to simulate")
    rows = _rows(folder)[skip:until]
    if len(rows) < 3:
        raise RunFolderError(f"{folder} has {len(rows)} steps after the first: let the run go on for a few more")
    workload = _workload(folder, config, rows)
    return RecordedRun(
        config=config,
        workload=workload,
        system=_system(config, rows, prompt_tokens=workload.prompt_tokens),
        step_s=mean(row["time/step_s"] for row in rows),
        num_steps=len(rows) + skip,
    )


def _rows(folder: Path) -> list[dict[str, float]]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        raise RunFolderError(f"{folder / 'metrics.jsonl'}: {error.strerror}: give the folder of a run") from error
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "time/step_s" in row and "time/wait_s" in row]


def _workload(folder: Path, config: RlvrConfig, rows: Sequence[dict[str, float]]) -> Workload:
    done, scored_s, num_failed = [], [], 0
    scoring: dict[str, float] = {}
    for event in read_journal(folder / JOURNAL_FOLDER):
        if event.state is SampleState.SCORING:
            scoring[event.sample_id] = event.time_s
        elif event.state is SampleState.DONE and "stored" in event.detail:
            done.append(event)
            if event.sample_id in scoring:
                scored_s.append(max(0.0, event.time_s - scoring.pop(event.sample_id)))
        elif event.state is SampleState.FAILED:
            num_failed += 1
    if not done:
        raise RunFolderError(f"{folder}: its journal has no sample that ended")
    samples = [one for event in done[-MAX_SAMPLES:] if (one := read_stored(event, text_of=lambda ids: ""))]
    lengths = [len(turn.completion.token_ids) for one in samples for turn in one.turns]
    first = [len(one.turns[0].prompt_ids) for one in samples if one.turns]
    later = [
        len(turn.prompt_ids) - len(before.prompt_ids) - len(before.completion.token_ids)
        for one in samples
        for before, turn in zip(one.turns, one.turns[1:], strict=False)
    ]
    domains = list(config.envs)
    return Workload(
        lengths=empirical(lengths, salt=1),
        prompt_tokens=mean(first),
        max_tokens=max(lengths),
        turns=empirical([len(one.turns) for one in samples], salt=2),
        reply_tokens=max(0.0, mean(later)) if later else 0.0,
        reset_s=fixed(_of_domains(rows, domains, "reset_s")),
        env_s=fixed(_of_domains(rows, domains, "step_s")),
        score_s=empirical(scored_s or [0.0], salt=3),
        rewards=empirical(_rewards(done), salt=4),
        failed=num_failed / (num_failed + len(done)),
        env_slots=env_slots(config),
    )


def _rewards(done: Sequence[Event]) -> list[float]:
    return [float(event.detail["reward"]) for event in done[-MAX_SAMPLES:]]


def _of_domains(rows: Sequence[dict[str, float]], domains: Sequence[str], name: str) -> float:
    found = [row[f"env/{domain}/{name}"] for row in rows for domain in domains if f"env/{domain}/{name}" in row]
    return median(found) if found else 0.0


def _system(config: RlvrConfig, rows: Sequence[dict[str, float]], *, prompt_tokens: float) -> System:
    """The engine's step from its own count of steps and seconds; what a step does beside waiting and pushing is training.

    Training is timed by the tokens that the simulation counts, prompts and completions once each: turns whose contexts were
    trained on again and again made a token dearer.
    """
    engine_seats, policy_seats = _seats(config)
    on_cpu = config.policy.devices == "cpu" and config.engine.devices == "cpu"
    train_s, token_s = _line(
        [row["tokens"] + config.rollout.prompts_per_step * prompt_tokens for row in rows],
        [row["time/step_s"] - row["time/wait_s"] - row["time/push_s"] for row in rows],
    )
    prefill_s = prefill_of(rows)
    return System(
        engine=EngineModel(
            decode_s=fit_decode(rows, max_running=config.engine.max_running, prefill_s=prefill_s),
            prefill_s=prefill_s,
            max_running=config.engine.max_running,
            report_every=config.engine.report_every,
            load_s=median(row["time/push_s"] for row in rows),
        ),
        engine_seats=engine_seats,
        policy_seats=policy_seats,
        train_s=train_s,
        train_token_s=token_s,
        streams_from=_streams_from(config),
        sharing=sharing_of(rows) if on_cpu else 0.0,
        num_devices=len({device for seat in (*engine_seats, *policy_seats) for device in seat}),
    )


def _streams_from(config: RlvrConfig) -> int | None:
    strategy = config.policy.strategy
    num_ranks = strategy.num_ranks if isinstance(strategy, RanksStrategyConfig) else 1
    return streams_from(config, num_ranks=num_ranks or len(_seats(config)[1]))


def sharing_of(rows: Sequence[dict[str, float]]) -> float:
    """How far trainer and engine of a run on the CPU slow each other while both are at work (see `Cores`).

    On a quiet machine they do as far as their threads are more than its cores. Beside other programs a run has its share of
    the cores, which its parts divide among themselves. A run that did not note its threads is taken to use all cores.
    """
    crowded = mean(row.get("machine/core_wait", 0.0) for row in rows)
    cores, threads = (rows[-1].get(f"machine/{name}", 1.0) for name in ("cores", "threads"))
    return crowded + (1 - crowded) * min(1.0, max(0.0, 2 * threads / cores - 1))


def _seats(config: RlvrConfig) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Of engines and policy. Where a config left them to the planner, they are taken to be apart."""
    if "auto" in (config.engine.devices, config.policy.devices):
        return config.engine.ranks(("1",)), (("0",),)
    return config.engine.ranks(parse_devices(config.engine.devices)), (parse_devices(config.policy.devices),)


def prefill_of(rows: Sequence[dict[str, float]]) -> float:
    """Seconds in which the engine reads a token of context. No run measures them: a pass forward is a third of what training on
    a token takes. At most half of the engine's time is laid to reading."""
    trained_s = sum(row["time/train_s"] for row in rows) / max(1.0, sum(row["train/tokens"] for row in rows))
    busy_s, num_read = (sum(row.get(f"engine/{name}", 0.0) for row in rows) for name in ("busy_s", "prefill_tokens"))
    return min(trained_s / 3, busy_s / 2 / max(1.0, num_read))


def fit_decode(rows: Sequence[dict[str, float]], *, max_running: int, prefill_s: float) -> Callable[[int], float]:
    """Seconds of a step against how many run in it, without those of reading."""
    used = [row for row in rows if row.get("engine/busy_s") and row.get("engine/occupancy")]
    if not used:
        raise RunFolderError("the run's metrics have no engine/busy_s: it was made by an earlier version")
    running = [row["engine/occupancy"] * max_running for row in used]
    writing_s = [max(0.0, row["engine/busy_s"] - prefill_s * row["engine/prefill_tokens"]) for row in used]
    seconds = [spent_s * n / row["engine/tokens"] for spent_s, row, n in zip(writing_s, used, running, strict=True)]
    base_s, each_s = _line(running, seconds)
    return lambda num: base_s + each_s * num


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Base and slope of the least-squares line, neither below zero; through the means. Where x hardly varies it says little of
    the slope, which is then near zero."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    spread = float(((xs - xs.mean()) ** 2).sum()) + len(xs) * (MIN_SPREAD * float(xs.mean())) ** 2
    slope = float(((xs - xs.mean()) * (ys - ys.mean())).sum()) / spread if spread else 0.0
    slope = min(max(slope, 0.0), float(ys.mean() / xs.mean())) if xs.mean() else 0.0
    return max(0.0, float(ys.mean() - slope * xs.mean())), slope
