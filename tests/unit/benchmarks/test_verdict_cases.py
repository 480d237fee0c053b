from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # scripts, no package

from report import RESULTS
from verdict_cases import KINDS, make_cases
from verdict_page import PAGE, page_of
from verdicts import Reroll, judge


def test_cases_are_the_same_every_time_and_no_answer_is_both_right_and_wrong() -> None:
    cases = make_cases(3, seed=0)
    assert cases == make_cases(3, seed=0)
    assert {case.kind for case in cases} == set(KINDS)
    for case in cases:
        assert case.gold in case.same
        assert len(case.same) > 2
        assert len(case.other) > 2
        assert not set(case.same) & set(case.other), case.gold


def test_a_reference_of_every_kind_is_judged_without_a_fault() -> None:
    grader = Reroll()
    for case in make_cases(1, seed=0):
        tally = judge(grader, case)
        assert not tally.refused
        assert not tally.accepted
        assert not tally.unreadable


def test_the_page_is_what_was_measured() -> None:
    measured = json.loads((RESULTS / "verdicts.json").read_text())
    assert PAGE.read_text() == page_of(measured)
