from __future__ import annotations

import json
from typing import Any

import pytest

from reroll.errors import RewardError
from reroll.types import Prompt
from reroll_zoo.code.suite import FunctionTests, ProgramTests, read_tests
from reroll_zoo.code.values import Equality, Reply

EQUALITY = Equality(tolerance=1e-6, loose=True)


def read(tests: Any, *, key: str = "tests") -> ProgramTests | FunctionTests:
    return read_tests(Prompt(id="code/1", messages=(), domain="code", extra={key: tests}), key=key, equality=EQUALITY)


def functions(tests: Any) -> FunctionTests:
    suite = read(tests)
    assert isinstance(suite, FunctionTests)
    return suite


def test_programs_are_tested_by_texts_or_lists_of_lines() -> None:
    expected = ProgramTests((("1\n2", "3"),))
    assert read({"stdin": ["1\n2"], "stdout": ["3"]}) == expected
    assert read({"inputs": ["1\n2"], "outputs": ["3"]}) == expected
    assert read({"inputs": [["1", 2]], "outputs": [["3"]], "fn_name": None}) == expected
    assert read(json.dumps({"inputs": ["1\n2"], "outputs": ["3"]})) == expected


def test_calls_are_questions_with_arguments_and_judged_by_what_they_return() -> None:
    calls = [{"args": [1], "kwargs": {"b": 2}, "returns": [3]}, {"returns": None}]
    suite = functions({"function": "f", "calls": calls, "setup": "import math"})
    assert suite.setup == "import math"
    assert [question.ask for question in suite.questions] == [
        {"function": "f", "args": [1], "kwargs": {"b": 2}},
        {"function": "f", "args": [], "kwargs": {}},
    ]
    assert suite.questions[0].accepts(Reply(value=(3,)))
    assert not suite.questions[0].accepts(Reply(value=3))
    assert suite.questions[1].accepts(Reply(value=None))


def test_rows_of_apps_may_wrap_a_result_and_leave_an_argument_bare() -> None:
    suite = functions({"inputs": [[1, 2], 5], "outputs": [[[7]], 3], "fn_name": "f"})
    assert [question.ask["args"] for question in suite.questions] == [[1, 2], [5]]
    assert suite.questions[0].accepts(Reply(value=[[7]]))
    assert suite.questions[0].accepts(Reply(value=[7]))
    assert not suite.questions[0].accepts(Reply(value=7))


def test_asserts_are_split_where_they_can_be_and_run_inside_where_not() -> None:
    suite = functions(["assert f(1) == 2 and f(2) == 3", "assert f(1) == f(2)"])
    assert [question.ask for question in suite.questions] == [{"expression": "f(1)"}, {"expression": "f(2)"}]
    assert [test.source for test in suite.inside] == ["assert f(1) == f(2)"]
    assert suite.num_tests == 3
    assert functions({"asserts": ["assert near(f(1))"], "setup": "def near(x): ..."}).inside


def test_the_column_has_the_name_that_the_config_gives() -> None:
    assert read({"stdin": ["1"], "stdout": ["2"]}, key="cases") == ProgramTests((("1", "2"),))


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "the row has no column `tests`"),
        (7, "neither an object nor a list"),
        ("not json", "Expecting value"),
        ([], "`asserts` is not a list with at least one entry"),
        ({}, "`inputs` is not a list"),
        ({"stdin": ["1"]}, "`stdout` is not a list"),
        ({"stdin": ["1", "2"], "stdout": ["1"]}, "`stdin` and `stdout` differ in length"),
        ({"function": "f"}, "`calls` is not a list"),
        ({"function": "f", "calls": [{"args": [1]}]}, "not an object with `args` and `returns`"),
        ({"asserts": ["assert f("]}, "is no test: '(' was never closed"),
        ({"asserts": ["assert 1 == 1"]}, "is no test: it calls nothing that only the program can define"),
        ({"asserts": [3]}, "an assert is 3, not text"),
        ({"asserts": ["assert f(1) == 1"], "setup": "def ("}, "is no test"),
    ],
)
def test_a_row_that_cannot_be_read_says_why_and_names_the_forms(tests: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=r"tests of prompt code/1 cannot be read.*\{function, calls\}") as raised:
        read(tests)
    assert reason in str(raised.value)
