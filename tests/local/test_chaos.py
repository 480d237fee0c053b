"""The chaos bench in short: a few faults to a run, which ends as the undisturbed one.

It is slow: each of these faults has a quick test of its own (test_healing_run.py: the controller; test_agentic_run.py: an
environment; tests/contract: environments and rewards).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, no package

import chaos_rate  # noqa: E402
from chaos import SCENARIOS, by_fault, by_scenario, play  # noqa: E402
from chaos_faults import JUDGE, KILL, STOP  # noqa: E402

FAULTS = [(JUDGE, ""), (STOP, "policy"), (KILL, "reward"), (KILL, "controller")]
QUICK = [(KILL, "env"), (KILL, "reward"), (STOP, "controller")]


@pytest.mark.slow
def test_a_run_in_threads_gets_over_lost_workers_and_ends_as_if_there_had_been_none(tmp_path: Path) -> None:
    verdict = play(SCENARIOS["local"], 1, num_faults=len(QUICK), folder=tmp_path, only=QUICK)
    assert verdict.problems == []
    assert [(fault.kind, fault.role) for fault in verdict.faults] == QUICK
    assert all(fault.heal_s is not None for fault in verdict.faults)
    assert verdict.left_behind == []


@pytest.mark.slow
def test_a_run_in_processes_gets_over_a_few_faults_and_ends_as_if_there_had_been_none(tmp_path: Path) -> None:
    verdict = play(SCENARIOS["processes"], 3, num_faults=len(FAULTS), folder=tmp_path, only=FAULTS)
    assert verdict.problems == []
    assert [fault.kind for fault in verdict.faults] == [kind for kind, _ in FAULTS]
    assert verdict.restarts == 1
    assert verdict.left_behind == []
    [row] = by_scenario([verdict])
    assert (row["faults"], row["problems"]) == (4, 0)
    assert sum(row["healed"] for row in by_fault([verdict])) == 4


@pytest.mark.slow
def test_a_run_that_is_struck_again_and_again_is_set_against_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_rate, "EVERY_S", 15.0)
    rows, facts = chaos_rate.race(SCENARIOS["local-async"], 0, num_faults=2, folder=tmp_path)
    assert [row["violations"] for row in rows] == [0, 0]
    assert all(row["samples"] > 0 for row in rows)
    assert len(facts["faults"]) == 2
    assert facts["groups_compared"][0] == facts["groups_compared"][1] > 0
    assert 0 < facts["p_value_of_lengths"] <= 1
    assert 0 < facts["p_value_of_rewards"] <= 1
