"""What is asked, what is compared outside, and what has to run inside."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from reroll_zoo.code.asserts import SandboxedAssert, names_bound_by, read_assert
from reroll_zoo.code.values import Equality, Opaque, Reply

EQUALITY = Equality(tolerance=1e-6, loose=True)


def split(source: str, *, setup: str = "") -> list[str] | SandboxedAssert:
    test = read_assert(source, setup, EQUALITY)
    return test if isinstance(test, SandboxedAssert) else [expression for expression, _ in test]


def accepts(source: str, value: Any, *, equality: Equality = EQUALITY) -> bool:
    checks = read_assert(source, "", equality)
    assert not isinstance(checks, SandboxedAssert)
    assert len(checks) == 1
    return checks[0][1](Reply(value=value, is_true=bool(value)))


@pytest.mark.parametrize(
    ("source", "questions"),
    [
        ("assert f(1, b=[2]) == 3", ["f(1, b=[2])"]),
        ("assert 3 == f(1)", ["f(1)"]),
        ("assert f(1) == -3.5, 'message'", ["f(1)"]),
        ("assert f(g(1)) == {'a': (1, 2)}", ["f(g(1))"]),
        ("assert sorted(f(1), reverse=True) == [2, 1]", ["sorted(f(1), reverse=True)"]),
        ("assert round(f(1), 2) == 0.33", ["round(f(1), 2)"]),
        ("assert set(f(1)) == set([1, 2])", ["set(f(1))"]),
        ("assert f(1)[0].strip() == 'a'", ["f(1)[0].strip()"]),
        ("assert Solution().f(1) == 2", ["Solution().f(1)"]),
        ("assert f(1) is None", ["f(1)"]),
        ("assert f(1) == True", ["f(1)"]),
        ("assert f(1)", ["f(1)"]),
        ("assert not f(1)", ["f(1)"]),
        ("assert f(1) in (1, 2)", ["f(1)"]),
        ("assert 'a' not in f(1)", ["f(1)"]),
        ("assert f(1) >= 0", ["f(1)"]),
        ("assert math.isclose(f(1), 0.5, rel_tol=0.01)", ["f(1)"]),
        ("assert isclose(0.5, f(1))", ["f(1)"]),
        ("assert f(1) == pytest.approx(0.5, abs=0.1)", ["f(1)"]),
        ("assert abs(f(1) - 0.5) < 1e-6", ["f(1)"]),
        ("assert abs(0.5 - f(1)) <= 0.1", ["f(1)"]),
        ("assert f(1) == 10 ** 9 + 7 and f(2) == [0] * 3", ["f(1)", "f(2)"]),
        ("assert f(1) == float('-inf')", ["f(1)"]),
        ("assert f(1) == -math.inf", ["f(1)"]),
        ("assert sum(10, 15) == 6", ["sum(10, 15)"]),
        ("assert copy([1]) == [1]", ["copy([1])"]),
    ],
)
def test_an_assert_becomes_questions_that_hold_nothing_of_what_is_expected(source: str, questions: list[str]) -> None:
    assert split(source) == questions


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == f(2)",
        "assert f(2) == math.sqrt(4)",
        "assert near(f(1), 5)",
        "assert all(f(i) == i for i in range(3))",
        "assert (f(1) == 5) == True",
        "assert isinstance(f(1), int)",
        "assert bool(f(1)) == True",
        "assert (f(1) - 5) == 0",
        "assert f(1).issubset({1, 2})",
        "assert f(1) == 1 or f(1) == 2",
        "assert 1 < f(1) < 3",
        "assert abs(f(1) - f(2)) < 1",
        "assert max(f(1), 5) == 5",
        "assert sum(f(1), 5) == 5",
        "assert max(f(1), default=5) == 5",
        "assert len(f(1), f(2)) == 3",
        "assert np.allclose(f(1), [2])",
        "assert f == 3",
        "assert f(1) == 10 ** 10 ** 10",
        "assert f(1) == [0] * 10 ** 10",
        "x = f(1)\nassert x == 2",
        "for i in range(3):\n    assert f(i) == i",
        "near(f, 1)",
    ],
)
def test_an_assert_that_would_tell_the_program_what_is_expected_runs_inside(source: str) -> None:
    test = split(source, setup="import math\ndef near(a, b): return abs(a - b) < 1")
    assert isinstance(test, SandboxedAssert)
    assert test.own == {"f"}


def test_names_of_the_setup_are_not_the_programs() -> None:
    setup = "import numpy as np, os.path\nfrom math import isclose as near\nx = 1\ndef g():\n    inner = 2\nclass C: pass"
    assert names_bound_by(ast.parse(setup)) == {"np", "os", "near", "x", "g", "inner", "C"}
    assert isinstance(split("assert g(f(1))", setup=setup), SandboxedAssert)
    assert split("assert g(f(1))") == ["g(f(1))"]


def test_a_test_inside_takes_from_the_program_only_what_nothing_else_can_define() -> None:
    source = "def check(candidate):\n    for i in range(3):\n        assert math.floor(candidate(i)) == abs(g(i))\ncheck(f)"
    assert split(source) == SandboxedAssert(source, frozenset({"f", "g"}), frozenset({"math"}))


@pytest.mark.parametrize("source", ["assert True", "assert len(sorted([1])) == 1", "for i in range(3):\n    assert i < 3"])
def test_a_test_that_asks_nothing_of_the_program_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="nothing that only the program can define"):
        split(source)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("assert f(1) == 3", [3, 3.0], [4, None, "3", [3], Opaque()]),
        ("assert f(1) == 'a'", ["a"], ["b", b"a", None]),
        ("assert f(1) == True", [True, 1], [False, "True", Opaque()]),
        ("assert f(1) is True", [True], [1, "True", None]),
        ("assert f(1) is not None", [0, Opaque()], [None]),
        ("assert f(1) != 3", [4, None], [3]),
        ("assert f(1) == 0.1", [0.1, 0.1 + 1e-9], [0.2, "0.1", math.nan]),
        ("assert f(1) == float('inf')", [math.inf], [1e308, -math.inf, math.nan]),
        ("assert f(1) == float('nan')", [math.nan], [0.0, math.inf]),
        ("assert f(1) == {1, 2}", [frozenset({2, 1})], [frozenset({1}), [1, 2], frozenset({1, 2, 3})]),
        ("assert f(1) == {1: (2, [3])}", [{1: [2, [3]]}], [{1: [2]}, {}, {1: [2, [3]], 2: 0}]),
        ("assert f(1) in [1, 'a']", [1, "a"], [2, None, [1], Opaque()]),
        ("assert 'ab' in f(1)", ["cab", ["ab"], {"ab": 1}], ["a", [], None, 3]),
        ("assert 3 not in f(1)", [[1], []], [[3], (1, 3)]),
        ("assert f(1) > 2", [3, 2.5], [2, "3", None, Opaque()]),
        ("assert 2 >= f(1)", [2, 1], [3, None]),
        ("assert abs(f(1) - 0.5) < 0.01", [0.5, 0.505], [0.52, None, "0.5", Opaque(), math.nan]),
        ("assert math.isclose(f(1), 100, rel_tol=0.01)", [100, 99.5], [90, None, "100", math.nan]),
        ("assert f(1) == approx([1.0, 2.0], abs=0.1)", [[1.05, 2], (1, 2)], [[1.2, 2], [1.0], None]),
        ("assert f(1)", [1, [0], "a"], [0, [], None]),
        ("assert not f(1)", [0, "", None], [1]),
    ],
)
def test_the_answer_is_judged_as_python_would(source: str, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not accepts(source, value)] == []
    assert [value for value in bad if accepts(source, value)] == []


def test_strict_equality_tells_a_tuple_from_a_list() -> None:
    strict = Equality(tolerance=0, loose=False)
    assert accepts("assert f(1) == (1, [2])", (1, [2]), equality=strict)
    assert not accepts("assert f(1) == (1, [2])", [1, [2]], equality=strict)
    assert not accepts("assert f(1) == 0.1", 0.1 + 1e-9, equality=strict)


def test_what_is_not_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        split("assert f(")
