"""The chaos bench in short: a few faults to a run, which ends as the undisturbed one.

The run in threads is quick enough for every day; the others are slow, and each of their faults has a quick test of its own
(test_healing_run.py: the controller; test_agentic_run.py: an environment; tests/contract: environments and rewards).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, no package

import chaos_rate  # noqa: E402
from chaos import SCENARIOS, by_fault, by_scenario, play  # noqa: E402
from chaos_faults import HANG, JUDGE, KILL, STOP  # noqa: E402
from chaos_use import use_over_time  # noqa: E402

FAULTS = [(JUDGE, ""), (STOP, "policy"), (KILL, "reward"), (KILL, "controller")]
QUICK = [(KILL, "env"), (KILL, "reward"), (STOP, "controller")]


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
@pytest.mark.parametrize(
    ("kind", "faults"),
    [("processes", [(HANG, "env"), (HANG, "reward"), (HANG, "engine")]), ("ray", [(HANG, "actor"), (HANG, "code")])],
    ids=["processes", "ray"],
)
def test_a_run_gets_over_workers_that_hang_for_good(tmp_path: Path, kind: str, faults: list[tuple[str, str]]) -> None:
    verdict = play(SCENARIOS[kind], 5, num_faults=len(faults), folder=tmp_path, only=faults)
    assert verdict.problems == []
    assert [(fault.kind, fault.role) for fault in verdict.faults] == faults
    assert verdict.left_behind == []


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
    assert all(0 < facts[f"{test}_of_{what}"] <= 1 for test in ("p_value", "ks_p_value") for what in ("lengths", "rewards"))
    assert all(row["lives"] >= 1 and row["memory_mb"] for row in rows)
    assert all(row["memory_mb"].keys() == row["handles"].keys() for row in rows)


def test_what_controllers_use_is_told_at_fixed_times_of_those_that_lived_so_long() -> None:
    lives = [
        [(second, second // 3, 400.0 + number, 30 + number) for second in range(0, length, 2)]
        for number, length in enumerate((12, 32, 70))
    ]
    assert use_over_time(lives) == {
        "lives": 3,
        "memory_mb": {"10 s, 3 lives": 401.0, "30 s, 2 lives": 401.5, "60 s, 1 lives": 402.0},
        "handles": {"10 s, 3 lives": 31, "30 s, 2 lives": 31, "60 s, 1 lives": 32},
    }
    assert use_over_time([]) == {"lives": 0, "memory_mb": {}, "handles": {}}
