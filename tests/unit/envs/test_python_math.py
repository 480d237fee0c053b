from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from reroll.config.env_tools import PythonMathEnv
from reroll.envs.python_math import KINDS, PythonMath, calculate, draw_problem
from reroll.envs.tools.calls import write_call
from reroll.envs.tools.env import Task
from reroll.envs.tools.python import Result, python_tool, run_python
from reroll.envs.tools.tool import ToolError

SEEDS = range(40)


def run(code: str, *, timeout_s: float = 20.0, memory_mb: int = 512) -> Result:
    return run_python(code, timeout_s, memory_mb)


# The interpreter.


def test_code_prints_and_nothing_else_comes_back() -> None:
    result = run("import sys\nprint(6 * 7, 'é')\nsys.stderr.write('hm')")
    assert result == Result(stdout="42 é\n", stderr="hm", exit_code=0, timed_out=False)
    assert result.ok


def test_an_error_says_where_without_naming_a_file() -> None:
    result = run("x = 1\nx / 0")
    assert not result.ok
    assert result.exit_code == 1
    assert 'File "<stdin>", line 2' in result.stderr
    assert result.stderr.strip().endswith("ZeroDivisionError: division by zero")


def test_code_that_does_not_end_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import subprocess\nc = subprocess.Popen(['sleep', '600'])\nopen({str(mark)!r}, 'w').write(str(c.pid))\nc.wait()"
    result = run(code, timeout_s=2.0)
    assert result.timed_out
    assert not result.ok
    deadline = time.monotonic() + 10
    while _is_running(int(mark.read_text())):
        assert time.monotonic() < deadline


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_memory_is_limited() -> None:
    result = run("x = bytearray(10**9)", memory_mb=256)
    assert "MemoryError" in result.stderr
    assert run("print(len(bytearray(10**7)))", memory_mb=256).stdout == "10000000\n"


def test_a_flood_of_output_is_bounded() -> None:
    result = run("while True: print('x' * 1000)")
    assert not result.ok
    assert 0 < len(result.stdout) <= 256 * 1024


def test_code_sees_none_of_our_environment_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_PASSWORD", "1234")
    result = run("import os, sys\nprint(os.environ.get('OUR_PASSWORD'), os.listdir('.'), repr(sys.stdin.read()))")
    assert result.stdout == "None [] ''\n"
    assert os.environ["OUR_PASSWORD"] == "1234"


def test_equal_code_gives_equal_output_even_for_sets() -> None:
    code = "print({'north', 'south', 'east', 'west'})"
    assert run(code) == run(code)


@pytest.mark.parametrize("code", ["", "\ud800", "\x00", "print('unfinished"])
def test_any_text_may_be_run(code: str) -> None:
    assert not run(code).timed_out


# The tool.


def test_the_tool_returns_what_was_printed_or_asks_for_a_print() -> None:
    tool = python_tool(memory_mb=512)
    assert tool.run({"code": "print(1)\nprint(2)"}, 20.0) == "1\n2"
    assert "print what you want to see" in tool.run({"code": "1 + 1"}, 20.0)


def test_the_tool_tells_the_end_of_what_went_wrong() -> None:
    tool = python_tool(memory_mb=512)
    with pytest.raises(ToolError) as failed:
        tool.run({"code": "def f():\n    return int('a')\nprint('so far')\nf()"}, 20.0)
    told = str(failed.value).splitlines()
    assert told[0] == "so far"
    assert told[1].startswith('File "<stdin>", line 2')
    assert told[2] == "ValueError: invalid literal for int() with base 10: 'a'"
    with pytest.raises(ToolError, match=r"took more than 0.3 s"):
        tool.run({"code": "while True: pass"}, 0.3)
    with pytest.raises(ToolError, match="ended by signal 9"):
        tool.run({"code": "import os; os.kill(os.getpid(), 9)"}, 20.0)
    with pytest.raises(ToolError, match="failed without a word"):
        tool.run({"code": "raise SystemExit(3)"}, 20.0)


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
    env = PythonMath()
    first = (env.reset(3), [env.step(action) for action in env.solve()])
    again = PythonMath()
    assert first == (again.reset(3), [again.step(action) for action in again.solve()])


def test_the_known_problem_of_a_seed_stays_the_same() -> None:
    assert draw_problem(3)[0] == "What is the least common multiple of 78678 and 72333?"


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_the_oracle_works_the_answer_out(seed: int) -> None:
    env = PythonMath()
    env.reset(seed)
    call, answer = env.solve()
    outcome = env.step(call)
    assert f"<answer>{outcome.messages[0]['content']}</answer>" == answer
    assert env.solve() == [answer]
    last = env.step(answer)
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, 1.0)
    assert env.solve() == []


def test_the_answer_is_read_as_a_number_and_must_be_exact() -> None:
    env = PythonMath()
    for said, reward in (("4,484,646.", 1.0), ("4484646.0", 1.0), ("4484647", 0.0), ("about 4484646", 0.0), ("many", 0.0)):
        env.reset(3)
        assert env.step(f"<answer>{said}</answer>").reward == reward


def test_without_calls_left_the_oracle_only_answers() -> None:
    env = PythonMath(max_calls=1)
    env.reset(0)
    env.step(write_call("python", {"code": "print(1)"}))
    (answer,) = env.solve()
    assert env.step(answer).reward == 1.0


def test_a_failing_program_is_an_observation() -> None:
    env = PythonMath(call_timeout_s=0.5)
    env.reset(0)
    outcome = env.step(write_call("python", {"code": "print(1 / 0)"}) + write_call("python", {"code": "while 1: pass"}))
    assert "ZeroDivisionError" in outcome.messages[0]["content"]
    assert "took more than 0.5 s" in outcome.messages[1]["content"]
    assert outcome.info["effective"] == 0.0


def test_the_node_holds_the_options_of_the_class() -> None:
    node = PythonMathEnv(kind="python_math", max_calls=2, memory_mb=256)
    env = PythonMath(**node.model_dump(exclude={"kind"}))
    assert isinstance(env.draw_task(0), Task)
    assert PythonMath(**PythonMathEnv(kind="python_math").model_dump(exclude={"kind"}))._max_calls == PythonMath()._max_calls
