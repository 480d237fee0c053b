"""Where the time of one step of a run goes, in less than a hundred lines: by its journal, by torch.profiler, and by what Python
was at in each thread."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from reroll.observe.journal import STEPPED, TAKEN, SampleState, read_journal
from reroll_zoo.samples.activity import ACTIVITY
from reroll_zoo.step_profile import profile_events

NUM_OPS, NUM_GAPS, NUM_FRAMES, NUM_CALLS = 25, 8, 16, 8
_EVERY_S = 0.002
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_WAITS = {"wait", "get", "select", "_serve", "_recv", "poll", "readline", "_next_number", "_read_rows", "_read_memory", "_run"}
"""Functions in which a thread does nothing."""

Json = dict[str, Any]


class Seen(NamedTuple):
    """What a thread was at."""

    at_s: float
    thread: str
    leaf: str
    caller: str
    """The function of ours that it was in."""


class Stacks:
    """Looks at all threads, five hundred times a second."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside."""
        over = threading.Event()
        looker = threading.Thread(target=self._look, args=(over,), name="stacks", daemon=True)
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()

    def _look(self, over: threading.Event) -> None:
        names: dict[int | None, str] = {}
        while not over.wait(_EVERY_S):
            now_s, frames = time.time(), sys._current_frames()
            if frames.keys() - names.keys():
                names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in frames.items():
                name = names.get(thread, "?")
                if name != "stacks" and frame.f_code.co_name not in _WAITS:
                    self.seen.append(Seen(now_s, name, _told(frame), _told(_ours(frame))))


def _ours(frame: FrameType) -> FrameType:
    at: FrameType | None = frame
    while at is not None:
        if "/reroll" in at.f_code.co_filename and "site-packages" not in at.f_code.co_filename:
            return at
        at = at.f_back
    return frame


def _told(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def timeline(run: Path, step: int, stacks: Stacks) -> list[str]:
    """The lines about this step, which is the one that was profiled."""
    events = list(read_journal(run / "journal"))
    first_s = events[0].time_s
    stepped = [event.time_s - first_s for event in events if event.state == STEPPED]
    began_s = stepped[step - 2] if step > 1 else 0.0
    marks = _marks([(event.time_s - first_s, event) for event in events], began_s, stepped[step - 1])
    recorded = list(profile_events(run, first_s=first_s))
    busy = _union([event for event in recorded if event.get("cat") in _ON_GPU])
    seen = [one._replace(at_s=one.at_s - first_s) for one in stacks.seen]
    calls = [event for event in recorded if event.get("cat") in _CALLS]
    lines = [f"phases of step {step}: seconds, GPU busy, calls of CUDA (of all threads)"]
    for (start_s, _), (end_s, name) in pairwise(marks):
        share = _inside(busy, start_s, end_s)
        called = sum(event["dur"] for event in calls if start_s * 1e6 <= event["ts"] < end_s * 1e6) / 1e6
        lines.append(
            f"  {start_s - began_s:7.3f}  {end_s - start_s:7.3f} s  GPU {share:6.3f}  CUDA {called:6.3f}  until {name}"
        )
    lines += _gaps(busy, seen, began_s, marks[-1][0])
    lines += _table("calls of CUDA", ((event["name"], event["dur"]) for event in calls), NUM_CALLS)
    on_gpu = ((event["name"], event["dur"]) for event in recorded if event.get("cat") in _ON_GPU)
    lines += _table("kernels", on_gpu, NUM_OPS)
    lines += _table("operations of the trainer's thread, self", _own_times(recorded), NUM_OPS)
    at_work = Counter((one.thread, one.caller, one.leaf) for one in seen if began_s <= one.at_s <= marks[-1][0])
    lines.append(f"Python, looks at {_EVERY_S * 1e3:.0f} ms each (thread, our function, where)")
    lines += [
        f"  {count:5d}  {thread[:14]:14} {ours:44} {leaf}" for (thread, ours, leaf), count in at_work.most_common(NUM_FRAMES)
    ]
    return lines


def _marks(events: Sequence[tuple[float, Any]], began_s: float, ended_s: float) -> list[tuple[float, str]]:
    """When what was over, in the order of time."""
    marks = [(began_s, "the step before")]
    here = [(at_s, event) for at_s, event in events if began_s < at_s <= ended_s]
    for state, first, last in (
        (SampleState.SCORING, "first sample written", "last sample written"),
        (SampleState.DONE, "first sample judged", "last sample judged"),
    ):
        times = [at_s for at_s, event in here if event.state == state]
        marks += [(min(times), first), (max(times), last)] if times else []
    marks += [(at_s, "groups taken") for at_s, event in here if event.state == TAKEN]
    for at_s, event in here:
        if event.state == ACTIVITY and "role" in event.detail:
            marks.append((at_s, f"lease of {event.detail['role']} {'begun' if event.detail['is_on'] else 'over'}"))
    return sorted([*marks, (ended_s, "step over")])


def _union(events: Sequence[Json]) -> list[tuple[float, float, str, str]]:
    """Stretches of seconds in which the GPU was busy, with the first and the last kernel of each."""
    stretches: list[list[Any]] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if stretches and start <= stretches[-1][1] + 2e-5:  # Kernels follow each other within this.
            stretches[-1][1] = max(stretches[-1][1], end)
            stretches[-1][3] = event["name"]
        else:
            stretches.append([start, end, event["name"], event["name"]])
    return [(start, end, first, last) for start, end, first, last in stretches]


def _inside(busy: Iterable[tuple[float, float, str, str]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end, _, _ in busy)


def _gaps(busy: Sequence[tuple[float, float, str, str]], seen: Sequence[Seen], began_s: float, ended_s: float) -> list[str]:
    """The longest stretches in which the GPU had nothing to do, and what Python was at."""
    edges = [(began_s, began_s, "", "begin"), *(one for one in busy if began_s < one[1] and one[0] < ended_s)]
    gaps = [(after[0] - before[1], before[1], before[3], after[2]) for before, after in pairwise(edges)]
    lines = ["longest pauses of the GPU"]
    for length, at_s, before, after in sorted(gaps, reverse=True)[:NUM_GAPS]:
        inside = Counter((one.thread, one.caller) for one in seen if at_s <= one.at_s <= at_s + length)
        at_work = "; ".join(f"{count}x {thread[:10]} {ours}" for (thread, ours), count in inside.most_common(3))
        lines.append(f"  {at_s - began_s:7.3f}  {length * 1e3:7.1f} ms  {before[:24]} .. {after[:24]} | {at_work}")
    return lines


def _own_times(recorded: Sequence[Json]) -> Iterator[tuple[str, float]]:
    """Of each operation on the host what its own children did not take."""
    by_thread: dict[tuple[int, int], list[Json]] = defaultdict(list)
    for event in recorded:
        if event.get("cat") in {"cpu_op", *_CALLS}:
            by_thread[event["pid"], event["tid"]].append(event)
    for events in by_thread.values():
        open_: list[Json] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
                open_.pop()
            if open_ and open_[-1]["cat"] == "cpu_op":
                yield open_[-1]["name"], -event["dur"]
            if event["cat"] == "cpu_op":
                yield event["name"], event["dur"]
            open_.append(event)


def _table(title: str, times: Iterable[tuple[str, float]], num: int) -> list[str]:
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, microseconds in times:
        total[name] += microseconds  # type: ignore[assignment]
        calls[name] += microseconds >= 0
    lines = [f"{title}: ms, calls"]
    return lines + [f"  {us / 1e3:9.1f} {calls[name]:7d}  {name[:110]}" for name, us in total.most_common(num)]
