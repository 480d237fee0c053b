"""The code reward over the real sandbox: what programs deserve is what they get."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from code_programs import ASSERTS, CALLS, CASES, CPP_PROGRAMS, HOSTILE, INSIDE, METHOD, RIGHT, STDIO, Case, asked, fenced, said

from reroll.data.sources import load_source
from reroll.errors import RewardError, SandboxError
from reroll_zoo.code.config import CodeConfig, CodeLimitsConfig
from reroll_zoo.code.reward import Code
from reroll_zoo.code_tasks.config import CodeTasksConfig
from reroll_zoo.code_tasks.draw import LEVELS
from reroll_zoo.sandbox.base import Program, Ran, Sandbox
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.make import join_sandbox, open_sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = CodeLimitsConfig(wall_s=60.0, cpu_s=10.0, memory_mb=256, output_kb=64)
"""Little of everything but time, which runs out for what hangs alone."""
NO_TIME = {"call_s": 0.4, "limits": LIMITS.model_copy(update={"wall_s": 0.8, "cpu_s": 0.8})}
"""For programs that never end: that they are given up is all that can be seen of them."""


def config(**options: object) -> CodeConfig:
    return CodeConfig.model_validate({"kind": "code", "call_s": 10.0, "limits": LIMITS, **options})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    try:
        made = open_sandbox(LocalSandboxConfig(level="namespaces"), num_processes=2)
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    await made.close()


@pytest.mark.parametrize("case", CASES)
async def test_a_program_gets_what_it_deserves(sandbox: Sandbox, case: Case) -> None:
    time = NO_TIME if case.is_endless else {}
    score = await Code(config(**time), sandbox)(asked(case.tests), said(fenced(case.program)))
    assert score.value == case.value
    assert (score.info["passed"] == 1) == (case.value == 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("program", "parts"), CPP_PROGRAMS.values(), ids=CPP_PROGRAMS)
async def test_a_cpp_program_gets_what_it_deserves(sandbox: Sandbox, program: str, parts: dict[str, float]) -> None:
    limits = LIMITS.model_copy(update={"cpu_s": 1.0})  # What is endless has used that soon, however busy the machine.
    score = await Code(config(language="auto", limits=limits), sandbox)(asked(STDIO), said(fenced(program, "cpp")))
    assert score.value == parts["passed"]
    assert score.info == parts


async def test_the_thief_does_find_what_lies_in_its_own_process(sandbox: Sandbox) -> None:
    # Else its zero in the table would show nothing.
    leaky = {"function": "f", "calls": [{"args": [3], "returns": 32}], "setup": "notes = ['f(3) == 32']"}
    score = await Code(config(), sandbox)(asked(leaky), said(fenced(HOSTILE["steals what it finds"])))
    assert score.value == 1


@pytest.mark.parametrize("path", ["/proc/{}/mem", "/proc/{}/fd/1", "/proc/{}/environ", "/proc/1/fd/1", "/proc/1/mem"])
async def test_a_program_cannot_look_into_the_process_that_holds_its_tests(sandbox: Sandbox, path: str) -> None:
    program = f"import os\ndef f():\n    return open({path!r}.format(os.getppid()), 'rb').read(1)"
    tests = ["try:\n    f()\nexcept PermissionError:\n    pass\nelse:\n    assert False"]
    score = await Code(config(), sandbox)(asked(tests), said(fenced(program)))
    assert score.info == {"passed": 1, "compiled": 1, "ran": 1, "checked_inside": 1}


async def test_tests_inside_see_the_objects_of_a_program_but_not_its_equality(sandbox: Sandbox) -> None:
    program = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
    def __contains__(self, item): return True
    def __eq__(self, other): return True
    def issubset(self, other): return True
def merge(one, other): return Stack([*one, *other])
def count(): yield from range(3)
"""
    tests = [
        "s = Stack()\ns.push(1).push((2, 3))\nassert len(s) == 2 and s.pop() == (2, 3) and s[0] == 1 and list(s) == [1]",
        "s = Stack([5])\nassert 5 in s and 6 not in s and s.items == [5]",
        "assert list(merge(Stack([1]), Stack([2]))) == [1, 2]",
        "try:\n    Stack().pop()\nexcept IndexError:\n    pass\nelse:\n    assert False",
        "x = count()\nassert list(x) == [0, 1, 2] and sum(count()) == 3",
        "assert Stack([1]) == 7",
        "assert 7 in merge([1], [2])",
        "x = merge([1], [2])\nassert x.issubset({1, 2})",
        "assert merge(Stack([1]), [2]) == [1, 2]",
    ]
    score = await Code(config(credit="fraction"), sandbox)(asked(tests), said(fenced(program)))
    assert score.value == pytest.approx(5 / 9)


async def test_a_key_of_thousands_of_digits_is_a_wrong_answer_like_any_other(sandbox: Sandbox) -> None:
    tests = {"function": "f", "calls": [{"args": ["a"], "returns": {"a": 1}}]}
    score = await Code(config(), sandbox)(asked(tests), said(fenced("def f(x): return {10**5000: 1}")))
    assert score.value == 0


async def test_a_decimal_is_a_number_to_every_form_of_test(sandbox: Sandbox) -> None:
    program = "from decimal import Decimal\ndef f(a): return Decimal(a) / 4"
    half = {"function": "f", "calls": [{"args": [2], "returns": 0.5}]}
    inside = ["assert f(2) == f(1) + f(1)", "x = f(2)\nassert x == 0.5 and x + 1 > 1.4"]
    for tests in (half, ["assert f(2) == 0.5", "assert f(8) == 2"], inside):
        assert (await Code(config(), sandbox)(asked(tests), said(fenced(program)))).value == 1


async def test_a_setup_may_build_what_the_program_defines(sandbox: Sandbox) -> None:
    program = "class Node:\n    def __init__(self, data): self.data, self.left = data, None\n"
    program += "def height(node):\n    return 0 if node is None else 1 + height(node.left)"
    setup = "root = Node(1)\nroot.left = Node(2)"
    tests = {"asserts": ["assert height(root) == 2", "root.left.left = Node(3)\nassert height(root) == 3"], "setup": setup}
    reward = Code(config(), sandbox)
    assert (await reward(asked(tests), said(fenced(program)))).value == 1
    assert (await reward(asked(tests), said(fenced(program.replace("1 + h", "2 + h"))))).value == 0


@pytest.mark.parametrize("tests", [CALLS, ASSERTS, INSIDE, STDIO], ids=["calls", "asserts", "inside", "stdio"])
@pytest.mark.parametrize("text", ["", " \n", "```python\n```", "\x00\ud800", "()" * 5000, "(" * 20000, "```\n" * 9, "0"])
async def test_garbage_scores_nothing_and_fails_nothing(sandbox: Sandbox, tests: object, text: str) -> None:
    score = await Code(config(wrong=-0.5), sandbox)(asked(tests), said(text))
    assert score.value == -0.5
    assert score.info["passed"] == 0


async def test_credit_by_fraction_counts_every_test_and_credit_for_all_stops_at_the_first_failure(sandbox: Sandbox) -> None:
    half = "def f(a):\n    if a < 0: raise ValueError\n    return 7 * a + 11"
    score = await Code(config(credit="fraction"), sandbox)(asked(CALLS), said(fenced(half)))
    assert score.value == pytest.approx(2 / 3)
    assert score.info == {"passed": pytest.approx(2 / 3), "compiled": 1, "ran": 0}
    score = await Code(config(), sandbox)(asked(CALLS), said(fenced(half)))
    assert score.value == 0
    assert score.info["passed"] == pytest.approx(1 / 3)
    score = await Code(config(credit="fraction"), sandbox)(asked(STDIO), said(fenced("print(6 if input() == '3' else 100)")))
    assert score.value == pytest.approx(2 / 3)


async def test_a_slow_call_does_not_cost_the_calls_after_it(sandbox: Sandbox) -> None:
    slow = "def f(a):\n    while a < 0: pass\n    return 7 * a + 11"
    score = await Code(config(credit="fraction", call_s=3.0), sandbox)(asked(CALLS), said(fenced(slow)))
    assert score.value == pytest.approx(2 / 3)  # Without its own limit the slow call would use up the run's.


async def test_all_calls_of_a_row_are_one_run_and_the_first_failure_ends_a_row_of_programs(sandbox: Sandbox) -> None:
    counting = Counting(sandbox)
    reward = Code(config(), counting)
    assert (await reward(asked(CALLS), said(fenced(RIGHT)))).value == 1
    assert len(counting.programs) == 1
    assert (await reward(asked(INSIDE), said(fenced(RIGHT)))).value == 1
    assert len(counting.programs) == 2
    await reward(asked(STDIO), said(fenced("print('?')")))
    assert len(counting.programs) == 3


async def test_no_expected_value_enters_the_sandbox(sandbox: Sandbox) -> None:
    counting = Counting(sandbox)
    calls = {"function": "f", "calls": [{"args": [1], "returns": "SECRET"}]}
    asserts = ["assert f(1) == 'SECRET'", "assert f(1) in ['SECRET']", "assert 'SECRET' in f(1)", "assert f(1) is not 'SECRET'"]
    for tests in (
        calls,
        asserts,
        {"inputs": [[1]], "outputs": ["SECRET"], "fn_name": "f"},
        {"stdin": ["1"], "stdout": ["SECRET"]},
    ):
        await Code(config(credit="fraction"), counting)(asked(tests), said(fenced("def f(a): return a")))
    assert len(counting.programs) == 4
    assert not any("SECRET" in program.source + program.stdin for program in counting.programs)


@pytest.mark.parametrize("family", [family.name for level in LEVELS.values() for family in level])
async def test_the_solution_of_a_generated_task_scores(sandbox: Sandbox, family: str) -> None:
    (prompt,) = load_source(CodeTasksConfig(kind="code_tasks", families=[family], size=1))
    assert prompt.answer is not None
    assert (await Code(config(require_fence=True), sandbox)(prompt, said(prompt.answer))).value == 1


@pytest.mark.parametrize("family", ["add_scaled", "is_multiple", "sum_of_squares", "count_greater", "best_run", "to_base"])
async def test_a_generated_task_with_another_constant_does_not_score(sandbox: Sandbox, family: str) -> None:
    (prompt,) = load_source(CodeTasksConfig(kind="code_tasks", families=[family], size=1, seed=3))
    (constant,) = set(re.findall(r"\d+", prompt.messages[0]["content"]))
    assert prompt.answer is not None
    wrong = re.sub(rf"\b{constant}\b", str(int(constant) + 1), prompt.answer)
    assert (await Code(config(), sandbox)(prompt, said(wrong))).value == 0


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": [[3], [-5]], "outputs": [32, -24], "fn_name": "f"},
        {"inputs": [[3], [-5]], "outputs": [[32], [-24]], "fn_name": "f"},
        json.dumps({"inputs": [[3], [-5]], "outputs": [32, -24], "fn_name": "f"}),
    ],
)
async def test_apps_and_taco_rows_are_taken_as_they_are(sandbox: Sandbox, tests: object) -> None:
    for program in (RIGHT, METHOD):
        assert (await Code(config(), sandbox)(asked(tests), said(fenced(program)))).value == 1
    assert (await Code(config(), sandbox)(asked(tests), said(fenced("def f(a): return 32")))).value == 0


async def test_functions_run_below_namespaces_too_and_tests_that_need_a_process_say_so() -> None:
    try:
        sandbox = open_sandbox(LocalSandboxConfig(level="rlimits"), num_processes=1)
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        reward = Code(config(), sandbox)
        assert (await reward(asked(CALLS), said(fenced("print('noise')\n" + RIGHT)))).value == 1
        with pytest.raises(RewardError, match="use a sandbox of level namespaces"):
            await reward(asked(INSIDE), said(fenced(RIGHT)))
    finally:
        await sandbox.close()


async def test_a_broken_sandbox_and_a_row_without_tests_fail_the_sample_and_not_the_policy() -> None:
    reward = Code(config(), Broken())
    with pytest.raises(RewardError, match="the sandbox failed: no place left"):
        await reward(asked(CALLS), said(fenced(RIGHT)))
    with pytest.raises(RewardError, match="code/1 cannot be read: the row has no column `tests`"):
        await reward(asked(None), said(fenced(RIGHT)))
    with pytest.raises(RewardError, match="arguments of a test cannot be written as JSON: Object of type bytes"):
        await reward(asked({"function": "f", "calls": [{"args": [b"a"], "returns": 1}]}), said(fenced(RIGHT)))
    with pytest.raises(RewardError, match="call Python functions: set language"):
        await Code(config(language="cpp"), Broken())(asked(CALLS), said(fenced(RIGHT, "cpp")))
    assert (await Code(config(language="auto"), Broken())(asked(CALLS), said(fenced(RIGHT, "cpp")))).value == 0


class Counting:
    """Passes programs on and keeps them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.level = sandbox.level
        self.programs: list[Program] = []

    async def run(self, program: Program) -> Ran:
        self.programs.append(program)
        return await self._sandbox.run(program)

    async def close(self) -> None: ...


class Broken:
    level = "broken"

    async def run(self, program: Program) -> Ran:
        raise SandboxError("no place left")

    async def close(self) -> None: ...


async def test_rewards_whose_programs_run_alike_share_a_sandbox_until_the_last_of_them_closes() -> None:
    mine, theirs = join_sandbox(LocalSandboxConfig()), join_sandbox(LocalSandboxConfig())
    await mine.close()
    await mine.close()
    assert (await theirs.run(Program(source="print(1)"))).stdout == "1\n"
    await theirs.close()
    with pytest.raises(SandboxError):
        await theirs.run(Program(source="print(1)"))
    again = join_sandbox(LocalSandboxConfig())
    assert (await again.run(Program(source="print(2)"))).stdout == "2\n"
    await again.close()
