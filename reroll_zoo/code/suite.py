"""The tests of a row, read from its `tests` column. Four forms are known:

- Programs: `{"stdin": ["1 2\\n", …], "stdout": ["3\\n", …]}`. Each text goes in, and what the program prints is compared.
- Functions: `{"function": "add", "calls": [{"args": [1, 2], "kwargs": {}, "returns": 3}, …]}`. A method of a class `Solution`
  may stand in place of a function.
- Asserts: `["assert add(1, 2) == 3", …]`, or `{"asserts": […]}`. A text that is not one assert statement is a test of its own.
- APPS and TACO: `{"inputs": […], "outputs": […]}`, with `"fn_name": "add"` for functions.

`"setup"` beside functions and asserts is code that runs before the program, such as imports, or after it if it needs its names.
The program sees it: no solution belongs there. The column may also hold all this as a JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reroll.errors import RewardError
from reroll.types import Prompt
from reroll_zoo.code.asserts import SandboxedAssert, read_assert
from reroll_zoo.code.values import Equality, Reply


@dataclass(frozen=True, slots=True)
class ProgramQuestion:
    """Something to ask a program, and how to judge what it answers."""

    ask: Mapping[str, Any]
    """As `sandboxed.function_calls` takes it: a function's name and arguments, or an expression."""
    accepts: Callable[[Reply], bool]


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Texts that go into a program, and texts that it should print."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Questions to a module's functions, and tests that must run beside them."""

    setup: str
    questions: tuple[ProgramQuestion, ...]
    inside: tuple[SandboxedAssert, ...] = ()

    @property
    def num_tests(self) -> int:
        return len(self.questions) + len(self.inside)


class _BadTests(Exception):
    """What is wrong with a row's tests."""


def read_tests(prompt: Prompt, *, key: str, equality: Equality) -> ProgramTests | FunctionTests:
    """The tests in that column of the row. RewardError if there are none or they take none of the known forms."""
    tests = prompt.extra.get(key)
    try:
        if isinstance(tests, str):
            tests = json.loads(tests)
        if isinstance(tests, list | tuple):
            tests = {"asserts": tests}
        if not isinstance(tests, Mapping):
            raise _BadTests(f"the row has no column `{key}`, or it holds neither an object nor a list")
        return _read(tests, equality)
    except (_BadTests, json.JSONDecodeError) as problem:
        known = "{stdin, stdout}, {function, calls}, {asserts}, {inputs, outputs}"
        raise RewardError(f"the tests of prompt {prompt.id} cannot be read: {problem} (write one of {known})") from None


def _read(tests: Mapping[str, Any], equality: Equality) -> ProgramTests | FunctionTests:
    setup = tests.get("setup") or ""
    if "asserts" in tests:
        return _read_asserts(_list(tests, "asserts"), setup, equality)
    if "function" in tests:
        calls = [_call(tests["function"], call, equality) for call in _list(tests, "calls")]
        return FunctionTests(setup, tuple(calls))
    if tests.get("fn_name"):
        pairs = _pairs(tests, "inputs", "outputs")
        return FunctionTests(setup, tuple(_apps_call(tests["fn_name"], args, wanted, equality) for args, wanted in pairs))
    keys = ("stdin", "stdout") if "stdin" in tests else ("inputs", "outputs")
    return ProgramTests(tuple((_text(given), _text(wanted)) for given, wanted in _pairs(tests, *keys)))


def _read_asserts(asserts: Sequence[Any], setup: str, equality: Equality) -> FunctionTests:
    questions: list[ProgramQuestion] = []
    inside: list[SandboxedAssert] = []
    for source in asserts:
        if not isinstance(source, str):
            raise _BadTests(f"an assert is {source!r}, not text")
        try:
            test = read_assert(source, setup, equality)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise _BadTests(f"{source!r} is no test: {error}") from None
        if isinstance(test, SandboxedAssert):
            inside.append(test)
        else:
            questions += [ProgramQuestion({"expression": expression}, accepts) for expression, accepts in test]
    return FunctionTests(setup, tuple(questions), tuple(inside))


def _call(function: Any, call: Any, equality: Equality) -> ProgramQuestion:
    if not isinstance(call, Mapping) or "returns" not in call:
        raise _BadTests(f"a call is {call!r}, not an object with `args` and `returns`")
    ask = {"function": str(function), "args": list(call.get("args") or ()), "kwargs": dict(call.get("kwargs") or {})}
    return ProgramQuestion(ask, partial(_returns, equality, call["returns"]))


def _apps_call(function: Any, args: Any, expected: Any, equality: Equality) -> ProgramQuestion:
    ask = {"function": str(function), "args": args if isinstance(args, list) else [args], "kwargs": {}}
    # These data sets wrap some results in a list of one.
    unwrapped = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return ProgramQuestion(ask, lambda reply: _returns(equality, expected, reply) or _returns(equality, unwrapped, reply))


def _returns(equality: Equality, expected: Any, reply: Reply) -> bool:
    return equality.same(expected, reply.value)


def _list(tests: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(tests.get(key), list | tuple) or not tests[key]:
        raise _BadTests(f"`{key}` is not a list with at least one entry")
    return list(tests[key])


def _pairs(tests: Mapping[str, Any], given: str, wanted: str) -> list[tuple[Any, Any]]:
    if len(_list(tests, given)) != len(_list(tests, wanted)):
        raise _BadTests(f"`{given}` and `{wanted}` differ in length")
    return list(zip(tests[given], tests[wanted], strict=True))


def _text(value: Any) -> str:
    """A text as it is; a list of lines as one text."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
