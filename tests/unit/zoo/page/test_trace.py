"""The trace of a journal is what Chrome's format asks for, and tells each sample's life."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from reroll.observe.journal import Journal, SampleState, read_journal
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo.page.trace import trace_events
from reroll_zoo.samples.activity import ACTIVITY
from reroll_zoo.samples.lifecycles import Lifecycles

NUMBER = {"type": "integer", "minimum": 0}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid"],
                "properties": {"name": {"type": "string"}, "pid": NUMBER, "tid": NUMBER, "args": {"type": "object"}},
                "oneOf": [
                    {"properties": {"ph": {"const": "X"}, "ts": NUMBER, "dur": NUMBER}, "required": ["ts", "dur"]},
                    {
                        "properties": {"ph": {"const": "i"}, "ts": NUMBER, "s": {"enum": ["g", "p", "t"]}},
                        "required": ["ts", "s"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "C"},
                            "ts": NUMBER,
                            "args": {"additionalProperties": {"type": "integer", "minimum": 0}},
                        },
                        "required": ["ts", "args"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]},
                        },
                        "required": ["args"],
                    },
                ],
            },
        },
    },
}
"""Chrome's trace event format, as far as it is used: complete slices, instants, counters, names."""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Two groups trained in two steps, one sample in flight, and a restart."""
    ticks = count()
    completion = Completion(token_ids=(1,), logprobs=(-0.5,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    turn = Turn(prompt_ids=(7,), completion=completion, text="a")
    folder = tmp_path / "run" / "journal"
    with Journal(folder, clock=lambda: 100.0 + next(ticks)) as journal:
        for step in (0, 1):
            ids = [f"{step}.0", f"{step}.1"]
            for id in ids:
                journal.record(id, SampleState.QUEUED, prompt="p", domain="ab"[step], version=step)
            for id in ids:
                journal.record(id, SampleState.GENERATING)
                journal.record(id, SampleState.SCORING, tokens=1)
                journal.ended(id, Trajectory(id=id, turns=(turn,), status=Status.COMPLETED, reward=0.5))
            journal.taken([step])
            for id in ids:
                journal.record(id, SampleState.TRAINED, version=step + 1)
            journal.stepped(version=step + 1)
    with Journal(folder, clock=lambda: 100.0 + next(ticks)) as journal:
        journal.resume(version=2, max_staleness=0)
        journal.record("2.0", SampleState.QUEUED, prompt="p", domain="a", version=2)
    return folder


def trace_of(folder: Path, metrics: tuple[dict[str, Any], ...] = ()) -> list[dict[str, Any]]:
    lives = Lifecycles()
    lives.take(read_journal(folder))
    return list(trace_events(lives, metrics))


def test_it_is_valid_and_slices_of_a_thread_lie_inside_each_other(journal: Path) -> None:
    events = trace_of(journal)
    jsonschema.validate({"traceEvents": events}, SCHEMA)
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in by_thread.values():
        for place, (start, end) in enumerate(slices):
            for other_start, other_end in slices[place + 1 :]:
                is_apart = other_start >= end or other_end <= start
                is_inside = start <= other_start <= other_end <= end
                assert is_apart or is_inside


def test_samples_steps_pushes_and_restarts_are_where_they_happened(journal: Path) -> None:
    events = trace_of(journal, ({"step": 1, "time/push_s": 0.5}, {"step": 2, "time/push_s": 0.25}))
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(names) == ["run", "samples of a", "samples of b"]
    slices = [event for event in events if event["ph"] == "X"]
    [sample] = [event for event in slices if event["name"] == "0.1"]
    assert sample["pid"] == names["samples of a"]
    assert (sample["args"]["reward"], sample["args"]["step"], sample["args"]["end"]) == (0.5, 1, "trained")
    inside = [
        event["name"]
        for event in slices
        if event["tid"] == sample["tid"]
        and event["pid"] == sample["pid"]
        and event is not sample
        and sample["ts"] <= event["ts"] < sample["ts"] + sample["dur"]
    ]
    assert inside == ["queued", "generating", "scoring", "done", "ready", "training"]
    pushes = {event["name"]: event["dur"] for event in slices if event["name"].startswith("push")}
    assert pushes == {"push v1": 500_000, "push v2": 250_000}
    assert [event["name"] for event in slices if event["pid"] == names["run"] and event["tid"] == 1] == [
        "wait for samples",
        "train step 1",
        "wait for samples",
        "train step 2",
    ]
    assert len([event for event in events if event["ph"] == "i"]) == 2
    *_, last = (event["args"] for event in events if event["ph"] == "C")
    assert last == {"queued": 1, "generating": 0, "scoring": 0, "done": 0, "ready": 0, "training": 0}


def test_the_command_prints_one_whole_json(journal: Path) -> None:
    command = [sys.executable, "-m", "reroll", "trace", str(journal.parent)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    trace = json.loads(printed)
    jsonschema.validate(trace, SCHEMA)
    assert trace["traceEvents"] == json.loads(json.dumps(trace_of(journal)))


def test_roles_are_processes_with_their_leases_and_engines_have_counters_and_faults(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Journal(journal, clock=count(100).__next__) as opened:  # A second for each event.
        for is_on in (True, False):
            opened.record("", ACTIVITY, role="policy", is_on=is_on)
        opened.record("", ACTIVITY, busy=[80, None], load=[3, 4])
        opened.record("", ACTIVITY, engine=1, fate="lost")
        opened.record("", ACTIVITY, role="engine", is_on=True)
    events = trace_of(journal)
    jsonschema.validate({"traceEvents": events}, SCHEMA)
    process = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert process.keys() == {"run", "engines", "trainer", "weights"}
    slices = {event["pid"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices[process["trainer"]] == (1_000_000, 1_000_000)
    assert process["weights"] in slices
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C" and event["pid"] == process["engines"]}
    assert counters == {"busy %": {"engine 0": 80}, "requests": {"engine 0": 3, "engine 1": 4}}
    [fault] = [event for event in events if event["ph"] == "i" and event["pid"] == process["engines"]]
    assert fault["name"] == "engine 1 lost"
