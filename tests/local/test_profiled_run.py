"""Steps that torch.profiler records on the trainer's ranks, in the trace of their run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.pipeline.run import train

CLOCKS_APART_US = 20_000
"""By so much the profiler's clock and the journal's may differ."""


@pytest.mark.parametrize(
    ("runtime", "num_ranks"), [("local", 1), pytest.param("processes", 2, marks=pytest.mark.slow, id="processes-2")]
)
def test_a_profiled_step_is_in_the_trace_at_its_time(
    rlvr_tree: dict[str, Any], reroll: Callable[..., Any], runtime: str, num_ranks: int
) -> None:
    rlvr_tree["run"] |= {"profile_steps": [2]}
    rlvr_tree["runtime"] = {"kind": runtime}
    if num_ranks > 1:
        rlvr_tree["policy"]["strategy"] = {"kind": "fsdp2", "num_ranks": num_ranks}
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    files = sorted(file.relative_to(outcome.folder / "profile") for file in outcome.folder.glob("profile/**/*.gz"))
    assert files == [Path(f"step-000002/rank-{rank}.json.gz") for rank in range(num_ranks)]

    events = json.loads(reroll("trace", str(outcome.folder), cwd=folder).stdout)["traceEvents"]
    steps = {event["name"]: event for event in events if event["name"].startswith("train step ")}
    begin = steps["train step 2"]["ts"]
    end = begin + steps["train step 2"]["dur"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    for rank in range(num_ranks):
        own = [event for event in events if event["pid"] == processes[f"trainer rank {rank} (torch.profiler)"]]
        work = [event for event in own if event["name"] == "aten::mm"]
        assert len(work) > 10
        assert {event["args"]["step"] for event in work} == {2}
        assert begin - CLOCKS_APART_US < min(event["ts"] for event in work)
        assert max(event["ts"] + event["dur"] for event in work) < end + CLOCKS_APART_US
        assert steps["train step 1"]["ts"] + steps["train step 1"]["dur"] < min(event["ts"] for event in work)


def test_a_run_that_asks_for_none_records_none(rlvr_tree: dict[str, Any]) -> None:
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    rlvr_tree["run"]["steps"] = 1
    outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    assert not (outcome.folder / "profile").exists()
