from __future__ import annotations

import math
from pathlib import Path
from typing import NoReturn

import pytest

from reroll.envs.make import import_problems, make_env
from reroll.errors import SandboxError
from reroll.tokens.tool_calls import write_call
from reroll_zoo.sandbox import blocking
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.tool_use.config import PythonToolConfig
from reroll_zoo.tool_use.env import Task
from reroll_zoo.tool_use.python import python_tool
from reroll_zoo.tool_use.python_math import KINDS, PythonMath, PythonMathConfig, calculate, draw_problem
from reroll_zoo.tool_use.tool import ToolError

SEEDS = range(40)


# The tool.


def python(code: str, *, timeout_s: float = 20.0, memory_mb: int = 512, site_packages: bool = False) -> str:
    """What the policy is told."""
    tool = python_tool(memory_mb=memory_mb, sandbox=LocalSandboxConfig(site_packages=site_packages))
    try:
        return tool.run({"code": code}, timeout_s)
    except ToolError as failed:
        return f"failed: {failed}"


def test_the_tool_returns_what_was_printed_or_asks_for_a_print() -> None:
    assert python("import sys\nprint(6 * 7, 'é')\nprint(2)\nsys.stderr.write('hm')") == "42 é\n2"
    assert "print what you want to see" in python("1 + 1")


def test_the_tool_tells_the_end_of_what_went_wrong() -> None:
    told = python("def f():\n    return int('a')\nprint('so far')\nf()").splitlines()
    assert told[0] == "failed: so far"
    assert told[1].startswith('File "main.py", line 2')
    assert told[2] == "ValueError: invalid literal for int() with base 10: 'a'"
    assert "took more than 0.3 s" in python("while True: pass", timeout_s=0.3)
    assert "ended by signal 9" in python("import os; os.kill(os.getpid(), 9)")
    assert "failed without a word" in python("raise SystemExit(3)")


def test_memory_is_limited() -> None:
    assert "MemoryError" in python("x = bytearray(10**9)", memory_mb=256)
    assert python("print(len(bytearray(10**7)))", memory_mb=256) == "10000000"


def test_a_flood_of_output_is_bounded() -> None:
    told = python("while True: print('x' * 1000)")
    assert told.endswith("The code wrote more than 256 kB and was stopped.")
    assert len(told) < 257 * 1024


def test_code_sees_none_of_our_environment_files_and_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUR_PASSWORD", "1234")
    asked = "os.environ.get('OUR_PASSWORD'), os.listdir('.'), repr(sys.stdin.read())"
    assert python(f"import os, sys\nprint({asked})") == "None [] ''"
    mark = tmp_path / "mark"
    python(f"open({str(mark)!r}, 'w').write('here')")
    python(f"import os\nos.system('touch {mark}')")
    assert not mark.exists()


def test_equal_code_gives_equal_output_even_for_sets() -> None:
    code = "print({'north', 'south', 'east', 'west'})"
    assert python(code) == python(code)


def test_installed_packages_are_there_if_the_config_says_so() -> None:
    assert "No module named 'numpy'" in python("import numpy")
    assert python("import numpy\nprint(numpy.arange(3).sum())", site_packages=True) == "3"
    assert PythonToolConfig(kind="python").sandbox == LocalSandboxConfig(site_packages=True)


@pytest.mark.parametrize("code", ["", "\ud800", "\x00", "print('unfinished"])
def test_any_text_may_be_run(code: str) -> None:
    assert "took more than" not in python(code)


def test_without_a_sandbox_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(config: object, *, num_processes: int, preload: object) -> NoReturn:
        raise SandboxError("no sandbox on this machine: set kind: remote")

    monkeypatch.setattr(blocking, "open_sandbox", none_here)
    monkeypatch.setattr(blocking, "_shared", {})
    with pytest.raises(SandboxError, match="set kind: remote"):
        PythonMath(PythonMathConfig())
    problems = import_problems({"sums": PythonMathConfig()})
    assert "set kind: remote" in problems["sums"]


# The problems.


@pytest.mark.parametrize(
    ("kind", "numbers", "answer"),
    [
        (0, {"a": 123, "b": 456, "m": 100}, 88),
        (1, {"a": 3, "b": 4, "m": 50}, 31),
        (2, {"a": 2, "b": 15}, 3 + 2 + 7 + 6 + 8),
        (3, {"a": 4, "b": 6}, 12),
        (4, {"a": 10, "n": 10}, 4),
        (5, {"n": 20, "a": 6, "b": 9}, 4),
        (6, {"a": 3, "n": 2}, 9 + 16 + 25),
        (7, {"n": 84}, 7),
    ],
)
def test_every_kind_of_problem_has_the_answer_of_its_question(kind: int, numbers: dict[str, int], answer: int) -> None:
    assert set(KINDS[kind].ranges) == set(numbers)
    assert calculate(KINDS[kind].expression.format(**numbers)) == answer


def test_all_kinds_are_drawn_and_questions_are_short_and_all_different() -> None:
    questions = [draw_problem(seed)[0] for seed in range(400)]
    assert len(set(questions)) == len(questions)
    assert max(map(len, questions)) < 100
    stems = {kind.question.partition("{")[0] for kind in KINDS}
    assert all(any(question.startswith(stem) for question in questions) for stem in stems)


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_held_out_seeds_rarely_meet(kind: object) -> None:
    """The instances of a kind are so many that chance repeats few."""
    assert math.prod(high - low for low, high in kind.ranges.values()) > 10**5  # type: ignore[attr-defined]


def test_equal_seeds_give_equal_episodes() -> None:
    env = PythonMath(PythonMathConfig())
    first = (env.reset(3), [env.step(action) for action in env.solve()])
    again = PythonMath(PythonMathConfig())
    assert first == (again.reset(3), [again.step(action) for action in again.solve()])


def test_the_known_problem_of_a_seed_stays_the_same() -> None:
    assert draw_problem(3)[0] == "What is the least common multiple of 78678 and 72333?"


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_the_oracle_works_the_answer_out(seed: int) -> None:
    env = PythonMath(PythonMathConfig())
    env.reset(seed)
    call, answer = env.solve()
    outcome = env.step(call)
    assert f"<answer>{outcome.messages[0]['content']}</answer>" == answer
    assert env.solve() == [answer]
    last = env.step(answer)
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, 1.0)
    assert env.solve() == []


def test_the_answer_is_read_as_a_number_and_must_be_exact() -> None:
    env = PythonMath(PythonMathConfig())
    for said, reward in (("4,484,646.", 1.0), ("4484646.0", 1.0), ("4484647", 0.0), ("about 4484646", 0.0), ("many", 0.0)):
        env.reset(3)
        assert env.step(f"<answer>{said}</answer>").reward == reward


def test_without_calls_left_the_oracle_only_answers() -> None:
    env = PythonMath(PythonMathConfig(max_calls=1))
    env.reset(0)
    env.step(write_call("python", {"code": "print(1)"}))
    (answer,) = env.solve()
    assert env.step(answer).reward == 1.0


def test_a_failing_program_is_an_observation() -> None:
    for code, limit_s, told in (("print(1 / 0)", 60.0, "ZeroDivisionError"), ("while 1: pass", 0.5, "took more than 0.5 s")):
        env = PythonMath(PythonMathConfig(call_timeout_s=limit_s))
        env.reset(0)
        outcome = env.step(write_call("python", {"code": code}))
        assert told in outcome.messages[0]["content"]
        assert outcome.info["effective"] == 0.0


def test_the_node_holds_the_options_of_the_class() -> None:
    node = PythonMathConfig(max_calls=2, memory_mb=256)
    env = make_env(node)
    assert isinstance(env, PythonMath)
    assert isinstance(env.draw_task(0), Task)
