"""`run.profile_steps`: what a training rank does in a step, as torch.profiler records it, and the same in the trace of its run.

Each rank writes a file of its own, `profile/step-000003/rank-0.json.gz`, which Perfetto opens by itself too. A mark in it says
what the clock of the journal said, so that both can be laid over each other.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reroll.errors import RunFolderError

FOLDER = "profile"
_CLOCK = "reroll clock "
_FIRST_PROCESS = 1000
"""Of the trace: the ranks come after all that the journal tells of."""

Json = dict[str, Any]


def record(file: Path) -> Callable[[], None]:
    """Record this thread's operations, and the GPU's, from now on. What is returned ends that, on the same thread, and writes
    the file."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    recorder = profile(activities=activities, acc_events=True)
    recorder.start()
    with record_function(f"{_CLOCK}{time.time():.6f}"):
        pass

    def stop() -> None:
        recorder.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"unfinished-{file.name}")
        recorder.export_chrome_trace(str(unfinished))
        unfinished.replace(file)

    return stop


def profile_events(run: Path, *, first_s: float) -> Iterator[Json]:
    """What the ranks recorded, in Chrome's trace format, each rank a process; `first_s` is the journal's first event."""
    threads: dict[int, dict[tuple[Any, Any], int]] = {}
    for file in sorted((run / FOLDER).glob("step-*/rank-*.json.gz")):
        rank = int(file.name.removeprefix("rank-").removesuffix(".json.gz"))
        process, known = _FIRST_PROCESS + rank, threads.setdefault(rank, {})
        if not known:
            yield from _named(process, f"trainer rank {rank} (torch.profiler)")
        events = _read(file)
        shift_us = _shift_us(events, first_s, file)
        for event in events:
            if event.get("ph") != "X" or not isinstance(event.get("tid"), int | str):
                continue
            thread = known.setdefault((event["pid"], event["tid"]), len(known) + 1)
            kept: Json = {name: event[name] for name in ("ph", "name", "cat", "dur") if name in event}
            yield {**kept, "pid": process, "tid": thread, "ts": round(event["ts"] + shift_us, 3), "args": {"step": _step(file)}}


def _step(file: Path) -> int:
    return int(file.parent.name.removeprefix("step-"))


def _named(process: int, name: str) -> Iterator[Json]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}


def _read(file: Path) -> list[Json]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            events: list[Json] = json.load(text)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}: remove it to see the rest") from error
    return events


def _shift_us(events: list[Json], first_s: float, file: Path) -> float:
    """From the profiler's clock to microseconds after the journal's first event."""
    for event in events:
        name = event.get("name", "")
        if name.startswith(_CLOCK) and event.get("ph") == "X":
            return (float(name.removeprefix(_CLOCK)) - first_s) * 1e6 - float(event["ts"])
    raise RunFolderError(f"{file} does not say when it was recorded: remove it to see the rest")
