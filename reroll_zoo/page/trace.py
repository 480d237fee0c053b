"""A run's journal as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Chrome's trace format (JSON): the run's steps, each role and each domain are processes, the lanes in which samples follow each
other are threads, leases are slices and so are samples, through their phases; what is in flight is a counter, and so is each
engine's share of busy time and its queue. Times are microseconds after the journal's first event.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reroll.observe.journal import BEGUN, STEPPED, TAKEN
from reroll_zoo.samples.activity import JOINED, LOST, RESTARTED
from reroll_zoo.samples.lifecycles import Lifecycle, Lifecycles, Mark, Phase

Json = dict[str, Any]

_RUN, _ENGINES, _FIRST_ROLE, _FIRST_DOMAIN = 1, 2, 3, 10
_STEPS, _PUSHES = 1, 2
"""Threads of the run's own process."""
_ROLES = {
    "policy": ("trainer", "holds the policy's devices"),
    "engine": ("weights", "hold the engines' devices: a push"),
    "evaluation": ("evaluation", "held-out prompts"),
    "checkpoint": ("checkpoint", "the run stands still for it"),
}
"""What the journal calls a role; its process, and what its slices say."""
_FATES = (LOST, RESTARTED, JOINED)
_LIVING = [phase for phase in Phase if phase < Phase.TRAINED]


def trace_events(lives: Lifecycles, metrics: Sequence[Mapping[str, Any]] = ()) -> Iterator[Json]:
    """Every event of the trace. `metrics` are the rows of metrics.jsonl, which tell how long each push took."""
    first_s = lives.first_s or 0.0
    ordered = sorted(lives.newest_first(), key=lambda life: life.serial)
    push_s = {row["step"]: row.get("time/push_s") or 0.0 for row in metrics if "time/push_s" in row}
    yield from _named(_RUN, "run", {_STEPS: "steps", _PUSHES: "pushes of weights"})
    yield from _step_events(lives.marks, push_s, first_s)
    yield from _engine_events(lives, first_s)
    yield from _role_events(lives, first_s)
    domains = sorted({life.domain for life in ordered})
    for process, domain in enumerate(domains, start=_FIRST_DOMAIN):
        own = [life for life in ordered if life.domain == domain]
        lanes = _lanes(own)
        yield from _named(process, f"samples of {domain}", {lane: f"lane {lane}" for lane in sorted(set(lanes))})
        for life, lane in zip(own, lanes, strict=True):
            yield from _sample_events(life, process=process, lane=lane, first_s=first_s, last_s=lives.last_s or first_s)
    yield from _counters(ordered, first_s)


def _engine_events(lives: Lifecycles, first_s: float) -> Iterator[Json]:
    """Counters of how busy each engine is and of its requests, and marks of what became of it. None where the journal says
    nothing of them."""
    faults = [mark for mark in lives.marks if mark.kind in _FATES]
    told = list(lives.activity.engines())
    if told or faults:
        yield from _named(_ENGINES, "engines", {1: "faults"} if faults else {})
    for mark in faults:
        name, ts = f"engine {mark.engine} {mark.kind}", _us(mark.time_s, first_s)
        yield {"ph": "i", "s": "p", "name": name, "pid": _ENGINES, "tid": 1, "ts": ts}
    for time_s, busy, load in told:
        at: Json = {"ph": "C", "pid": _ENGINES, "tid": 0, "ts": _us(time_s, first_s)}
        known = {f"engine {rank}": percent for rank, percent in enumerate(busy) if percent is not None}
        if known:
            yield {**at, "name": "busy %", "args": known}
        yield {**at, "name": "requests", "args": {f"engine {rank}": num for rank, num in enumerate(load)}}


def _role_events(lives: Lifecycles, first_s: float) -> Iterator[Json]:
    """Every lease as a slice of its role's process; evaluations and checkpoints too."""
    spans = list(lives.activity.spans(last_s=lives.last_s or first_s))
    roles = sorted({span.role for span in spans} & _ROLES.keys())
    for process, role in enumerate(roles, start=_FIRST_ROLE):
        name, what = _ROLES[role]
        yield from _named(process, name, {1: what})
        for span in spans:
            if span.role == role:
                yield _slice(name, process, 1, span.start_s, span.end_s, first_s, {})


def _named(process: int, name: str, threads: Mapping[int, str]) -> Iterator[Json]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for thread, thread_name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": thread_name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _step_events(marks: Iterable[Mark], push_s: Mapping[int, float], first_s: float) -> Iterator[Json]:
    """For each step: waiting for samples, training, and the push of its weights. Restarts are marks over all."""
    idle_since, taken = None, None
    for mark in marks:
        if mark.kind == BEGUN:
            idle_since, taken = mark.time_s, None
            about = {"version": mark.version}
            yield {
                "ph": "i",
                "s": "g",
                "name": "begun",
                "pid": _RUN,
                "tid": _STEPS,
                "ts": _us(mark.time_s, first_s),
                "args": about,
            }
        elif mark.kind == TAKEN:
            taken = mark.time_s
        elif mark.kind == STEPPED and mark.version is not None:
            start = taken if taken is not None else mark.time_s
            pushed_at = max(start, mark.time_s - push_s.get(mark.version, 0.0))
            about = {"version": mark.version}
            if idle_since is not None:
                yield _slice("wait for samples", _RUN, _STEPS, idle_since, start, first_s, about)
            yield _slice(f"train step {mark.version}", _RUN, _STEPS, start, pushed_at, first_s, about)
            yield _slice(f"push v{mark.version}", _RUN, _PUSHES, pushed_at, mark.time_s, first_s, about)
            idle_since, taken = mark.time_s, None


def _sample_events(life: Lifecycle, *, process: int, lane: int, first_s: float, last_s: float) -> Iterator[Json]:
    """A slice for the sample, and inside it one for each phase."""
    about = {
        "sample": life.id,
        "prompt": life.prompt,
        "version": life.version,
        "tokens": life.tokens,
        "reward": life.reward,
        "end": life.phase.name.lower(),
        "reason": life.reason or None,
        "step": life.trained_version,
    }
    about = {name: value for name, value in about.items() if value is not None}
    end_s = life.times_s[-1] if life.is_over else last_s
    yield _slice(life.id, process, lane, life.times_s[0], end_s, first_s, about)
    for phase, start_s, until_s in spans_of(life, last_s=last_s):
        yield _slice(phase.name.lower(), process, lane, start_s, until_s, first_s, {})


def spans_of(life: Lifecycle, *, last_s: float) -> Iterator[tuple[Phase, float, float]]:
    """What a sample did from when until when. What is not over lasts until `last_s`."""
    ends = [*life.times_s[1:], last_s]
    for phase, start_s, end_s in zip(life.phases, life.times_s, ends, strict=True):
        if phase < Phase.TRAINED:
            yield phase, start_s, end_s


def _counters(ordered: Iterable[Lifecycle], first_s: float) -> Iterator[Json]:
    """How many samples are in each phase, whenever that changes; at most once a millisecond."""
    changes: list[tuple[float, int, Phase | None, Phase]] = []
    for life in ordered:
        before: Phase | None = None
        for phase, time_s in zip(life.phases, life.times_s, strict=True):
            changes.append((round(time_s, 3), life.serial, before, phase))
            before = phase
    now: Counter[Phase] = Counter()
    told_s = None
    for time_s, _, before, phase in sorted(changes, key=lambda change: change[:2]):
        if told_s is not None and time_s != told_s:
            yield _count(now, told_s, first_s)
        if before is not None:
            now[before] -= 1
        now[phase] += 1
        told_s = time_s
    if told_s is not None:
        yield _count(now, told_s, first_s)


def _count(now: Mapping[Phase, int], time_s: float, first_s: float) -> Json:
    args = {phase.name.lower(): now.get(phase, 0) for phase in _LIVING}
    return {"ph": "C", "name": "samples in flight", "pid": _RUN, "tid": 0, "ts": _us(time_s, first_s), "args": args}


def _lanes(lives: Sequence[Lifecycle]) -> list[int]:
    """A thread for each sample that no other has while it lives: slices of one thread must not overlap."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes: list[int] = []
    for life in lives:
        while busy and busy[0][0] <= life.times_s[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (life.times_s[-1] if life.is_over else float("inf"), lane))
        lanes.append(lane)
    return lanes


def _slice(name: str, process: int, thread: int, start_s: float, end_s: float, first_s: float, args: Json) -> Json:
    start = _us(start_s, first_s)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": max(0, _us(end_s, first_s) - start),
        "args": args,
    }


def _us(time_s: float, first_s: float) -> int:
    return round((time_s - first_s) * 1e6)
