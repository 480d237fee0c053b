"""Ordinary programs, and ordinary mistakes."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Limits, Program, Ran
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.cpp import Compiler
from reroll_zoo.sandbox.inside.wire import Job, Result
from reroll_zoo.sandbox.local import LocalPool
from reroll_zoo.sandbox.make import open_sandbox

if TYPE_CHECKING:
    from conftest import Box

QUICK = Limits(cpu_s=10, wall_s=60, memory_mb=256, processes=8, file_mb=4, output_kb=64)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def test_a_program_reads_its_input_and_its_words_come_back(box: Box) -> None:
    ran = box.run("import sys\nprint(input(), sys.stdin.read().split())\nsys.stderr.write('hm é')", stdin="first é\n2 3\n4")
    assert (ran.status, ran.stdout, ran.stderr, ran.exit_code) == ("ok", "first é ['2', '3', '4']\n", "hm é", 0)
    assert ran.ok
    assert ran.wall_s > 0


def test_an_error_gives_the_traceback_of_the_program_alone(box: Box) -> None:
    ran = box.run("def half(x):\n    return x / 0\n\nprint('so far')\nhalf(1)")
    assert (ran.status, ran.exit_code, ran.stdout) == ("error", 1, "so far\n")
    lines = ran.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "main.py", line 5, in <module>'
    assert "    return x / 0" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("source", "exit_code", "stderr"),
    [
        ("exit(3)", 3, ""),
        ("import sys; sys.exit('bye')", 1, "bye\n"),
        ("raise SystemExit", 0, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os; os.abort()", -6, ""),
        ("import sys\nsys.excepthook = lambda *_: sys.stderr.write('my own words')\n1 / 0", 1, "my own words"),
    ],
)
def test_a_program_ends_with_the_code_it_would_have_on_its_own(box: Box, source: str, exit_code: int, stderr: str) -> None:
    ran = box.run(source)
    assert (ran.exit_code, ran.stderr) == (exit_code, stderr)
    assert ran.status == ("error" if exit_code else "ok")


@pytest.mark.parametrize("source", ["", "\x00", "\ud800", "print('unfinished", "x = 1\n  y = 2"])
def test_any_text_may_be_run(box: Box, source: str) -> None:
    assert box.run(source).status == ("ok" if source == "" else "error")


def test_a_program_is_the_main_module_of_an_interpreter_that_knows_nothing_of_us(box: Box) -> None:
    source = """
import __main__, sys
if __name__ == "__main__":
    print(__main__.__dict__ is globals(), __file__.endswith("main.py"), sys.argv)
    print([name for name in sys.modules if name.startswith("reroll")])
    def f(x: int): ...
    print(f.__annotations__)
"""
    assert box.run(source).stdout == "True True ['main.py']\n[]\n{'x': <class 'int'>}\n"


def test_threads_exit_handlers_and_open_files_end_as_in_an_interpreter(box: Box) -> None:
    source = """
import atexit, os, threading, time
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
out = os.fdopen(os.dup(1), "w")
out.write("file")
print("main")
"""
    ran = box.run(source)
    assert (ran.status, ran.stderr) == ("ok", "")
    assert sorted(ran.stdout.replace("file", "file\n").split()) == ["file", "handler", "main", "thread"]


def test_programs_share_neither_state_nor_chance(box: Box) -> None:
    source = """
import json, random, sys
print(random.random(), getattr(json, "mark", None), "evil" in sys.modules, len(sys.path))
json.mark = 1
sys.modules["evil"] = json
sys.path.append("/evil")
"""
    first, second = (box.run(source).stdout.split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1:] == second[1:]
    assert second[1:3] == ["None", "False"]


def test_sets_of_words_have_one_order(box: Box) -> None:
    source = "print({'north', 'south', 'east', 'west'}, hash('north'))"
    assert box.run(source).stdout == box.run(source).stdout
    assert "PYTHONHASHSEED" in box.run("import os; print(*os.environ)").stdout


def test_asyncio_and_the_usual_modules_work(box: Box) -> None:
    source = """
import asyncio, collections, decimal, heapq, json, re, unicodedata
async def main(): return (await asyncio.gather(asyncio.sleep(0.01, "a"), asyncio.sleep(0, "b")))
print(asyncio.run(main()), unicodedata.name("é"), json.dumps({"a": str(decimal.Decimal(1) / 8)}))
"""
    ran = box.run(source)
    assert (ran.stdout, ran.stderr) == ("['a', 'b'] LATIN SMALL LETTER E WITH ACUTE {\"a\": \"0.125\"}\n", "")


def test_input_of_megabytes_is_no_trouble_even_if_it_is_not_read(box: Box) -> None:
    stdin = "0123456789\n" * 200_000
    assert box.run("print('done')", stdin=stdin).stdout == "done\n"
    assert box.run("import sys; print(len(sys.stdin.read()))", stdin=stdin).stdout == f"{len(stdin)}\n"


def test_deep_recursion_is_an_error_of_the_program(box: Box) -> None:
    ran = box.run("def f(n): return f(n + 1)\nf(0)")
    assert ran.status == "error"
    assert "RecursionError" in ran.stderr


def test_a_crash_of_the_interpreter_is_an_error_of_the_program(box: Box) -> None:
    ran = box.run("import ctypes; ctypes.string_at(0)")
    assert (ran.status, ran.exit_code) == ("error", -11)


# Limits.


def test_wall_time_is_limited(box: Box) -> None:
    ran = box.run("import time; time.sleep(600)", limits=replace(QUICK, wall_s=0.5))
    assert (ran.status, ran.exit_code) == ("timeout", -9)
    assert ran.wall_s >= 0.5


def test_cpu_time_is_limited_and_the_words_before_come_back(box: Box) -> None:
    ran = box.run("print('before', flush=True)\nwhile True: pass", limits=replace(QUICK, cpu_s=0.3, wall_s=600))
    assert (ran.status, ran.stdout, ran.exit_code) == ("timeout", "before\n", -9)
    assert ran.wall_s < 600


def test_memory_is_limited(box: Box) -> None:
    ran = box.run("print('before')\nx = bytearray(10**9)")
    assert (ran.status, ran.stdout) == ("memory", "before\n")
    assert box.run("print(len(bytearray(10**8)))").stdout == "100000000\n"


def test_output_is_limited_and_its_start_comes_back(box: Box) -> None:
    ran = box.run("while True: print('x' * 99)")
    assert ran.status == "output"
    assert ran.stdout == (("x" * 99 + "\n") * 1000)[: 64 * 1024]
    assert box.run("print('x' * 65_000)").status == "ok"
    assert box.run("print('x' * 66_000)").status == "output"


def test_of_standard_error_the_end_comes_back(box: Box) -> None:
    ran = box.run("import sys\nfor i in range(5000): print(i, file=sys.stderr)")
    assert ran.status == "ok"
    assert ran.stderr.endswith("4998\n4999\n")
    assert len(ran.stderr) <= 16 * 1024


# C++.


@needs_compiler
def test_cpp_reads_and_writes_and_fails_as_python_does(box: Box) -> None:
    double = '#include <cstdio>\nint main() { int x; if (scanf("%d", &x) != 1) return 3; printf("%d\\n", 2 * x); }'
    assert box.run(double, language="cpp", stdin="21").stdout == "42\n"
    ran = box.run(double, language="cpp", stdin="")
    assert (ran.status, ran.exit_code) == ("error", 3)
    greedy = "#include <vector>\nint main() { std::vector<char> v(1UL << 40, 'x'); return v[9]; }"
    assert box.run(greedy, language="cpp").status == "memory"
    crash = "int main() { volatile int* p = nullptr; *p = 1; }"
    assert box.run(crash, language="cpp").exit_code == -11
    assert box.run("int main() { for (;;); }", language="cpp", limits=replace(QUICK, cpu_s=0.3)).status == "timeout"


@needs_compiler
def test_cpp_that_does_not_compile_gives_the_compilers_words(box: Box) -> None:
    ran = box.run("int main() { return missing; }", language="cpp")
    assert (ran.status, ran.exit_code) == ("error", 1)
    assert "‘missing’ was not declared" in ran.stderr or "'missing' was not declared" in ran.stderr


async def test_a_source_is_compiled_once_for_all_who_ask() -> None:
    jobs: list[Job] = []
    compiler = Compiler(partial(_pretend_to_compile, jobs))
    builds = await asyncio.gather(*(compiler.build(source) for source in ["a", "b", "a", "a"]))
    assert [build.kept for build in builds] == [b"a", b"b", b"a", b"a"]
    await compiler.build("b")
    assert sorted(job.stdin for job in jobs) == [b"a", b"b"]


async def test_old_binaries_make_room_for_new_ones() -> None:
    jobs: list[Job] = []
    compiler = Compiler(partial(_pretend_to_compile, jobs))
    for letter in "abac":
        await compiler.build(letter * 25 * 2**20)
    await compiler.build("a" * 25 * 2**20)
    assert len(jobs) == 3
    await compiler.build("b" * 25 * 2**20)
    assert len(jobs) == 4


async def test_a_build_that_failed_for_our_fault_is_tried_again() -> None:
    jobs: list[Job] = []
    compiler = Compiler(partial(_pretend_to_compile, jobs))
    for _ in range(2):
        with pytest.raises(SandboxError):
            await compiler.build("our fault")
    assert len(jobs) == 2


async def _pretend_to_compile(jobs: list[Job], job: Job) -> Result:
    jobs.append(job)
    await asyncio.sleep(0.01)
    if job.stdin == b"our fault":
        raise SandboxError("no place")
    return Result(reason="exit", code=0, wall_s=0.01, stdout=b"", stderr=b"", kept=job.stdin)


# Many at a time.


ENDLESS = Program(source="import time; time.sleep(600)", limits=Limits(wall_s=600))
HANGS_S = 120
"""What takes longer than this hangs, however busy the machine is."""


async def _open(num_processes: int) -> LocalPool:
    sandbox = open_sandbox(LocalSandboxConfig(), num_processes=num_processes)
    assert isinstance(sandbox, LocalPool)
    return sandbox


async def test_programs_run_at_the_same_time_and_answers_are_not_mixed_up() -> None:
    sandbox = await _open(3)
    try:
        programs = [Program(source="import time; time.sleep(0.05); print(input())", stdin=str(i)) for i in range(30)]
        rans = await asyncio.gather(*map(sandbox.run, programs))
        assert [ran.stdout for ran in rans] == [f"{i}\n" for i in range(30)]
        calls = [asyncio.create_task(sandbox.run(ENDLESS)) for _ in range(4)]
        async with asyncio.timeout(HANGS_S):
            while len(sandbox._channels) < 3:
                await asyncio.sleep(0.01)
        await _cancel(calls)
    finally:
        await sandbox.close()


async def test_waiting_for_a_place_does_not_count_as_the_programs_time() -> None:
    sandbox = await _open(1)
    try:
        first = asyncio.create_task(sandbox.run(ENDLESS))
        await asyncio.sleep(0.1)
        asked_s = time.monotonic()
        second = asyncio.create_task(sandbox.run(Program(source="print(1)")))
        await asyncio.sleep(0.3)
        freed_s = time.monotonic()
        await _cancel([first])
        ran = await second
        assert ran.stdout == "1\n"
        assert ran.wall_s <= time.monotonic() - freed_s < time.monotonic() - asked_s
    finally:
        await sandbox.close()


async def test_a_cancelled_call_ends_its_program_and_frees_its_place() -> None:
    sandbox = await _open(1)
    try:
        call = asyncio.create_task(sandbox.run(ENDLESS))
        await asyncio.sleep(0.3)
        await _cancel([call])
        async with asyncio.timeout(HANGS_S):
            assert (await sandbox.run(Program(source="print(1)"))).stdout == "1\n"
    finally:
        await sandbox.close()


async def _cancel(calls: list[asyncio.Task[Ran]]) -> None:
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


async def test_a_closed_sandbox_says_so() -> None:
    sandbox = await _open(1)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run(Program(source="print(1)"))


async def test_packages_are_there_only_if_asked_for() -> None:
    for asked in (False, True):
        sandbox = open_sandbox(LocalSandboxConfig(site_packages=asked), num_processes=1)
        try:
            ran = await sandbox.run(Program(source="import numpy; print(numpy.arange(5).sum())", limits=Limits(memory_mb=1024)))
        finally:
            await sandbox.close()
        assert (ran.stdout == "10\n") is asked, ran.stderr
