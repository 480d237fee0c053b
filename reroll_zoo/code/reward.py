"""The code reward: finds the program, runs it in the sandbox, and compares what comes out with what the row expects."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from reroll.errors import RewardError, SandboxError
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.code import sandboxed
from reroll_zoo.code.answer import ProgramAnswer, find_answer
from reroll_zoo.code.asserts import SandboxedAssert
from reroll_zoo.code.config import CodeConfig
from reroll_zoo.code.sandboxed.isolated_asserts import ALONE
from reroll_zoo.code.suite import FunctionTests, ProgramQuestion, ProgramTests, read_tests
from reroll_zoo.code.values import Equality, as_reply, read_replies, same_output
from reroll_zoo.sandbox.base import Language, Limits, Program, Ran, Sandbox
from reroll_zoo.sandbox.make import join_sandbox

_PYTHON_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError)\b", re.MULTILINE)
_CPP_SYNTAX = re.compile(r":\d+: (fatal )?error: |ld returned \d+ exit status|error: ld ")
_BOOT = """
import sys, types
for name, text in {modules!r}:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerdict:
    """What became of a program's tests."""

    num_passed: int = 0
    num_tests: int = 1
    compiled: bool = False
    ran: bool = False
    """No test that was tried made it crash or run out of a limit."""


class Code:
    """Scores by tests. Told beside the score: `passed` (the share of tests), `compiled`, `ran` (no crash, no limit), and for
    assert statements `checked_inside`: the share of tests that had to run in the sandbox, out of the program's process but not
    out of its box.
    """

    def __init__(self, config: CodeConfig, sandbox: Sandbox | None = None) -> None:
        """Programs run in `sandbox`, which closes with the reward; default: one that it shares with rewards like it."""
        self._config = config
        self._sandbox = sandbox or join_sandbox(config.sandbox)
        self._equality = Equality(tolerance=config.tolerance, loose=config.loose)
        self._limits = Limits(**config.limits.model_dump())

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """RewardError where the row has no readable tests or the sandbox does not work."""
        config = self._config
        tests = read_tests(prompt, key=config.tests_key, equality=self._equality)
        if isinstance(tests, FunctionTests) and config.language == "cpp":
            raise RewardError(f"the tests of prompt {prompt.id} call Python functions: set language to python or auto")
        answer = find_answer(trajectory.text, language=config.language, after=config.after, require_fence=config.require_fence)
        try:
            verdict = await self._judge(answer, tests) if answer else CodeVerdict()
        except SandboxError as error:
            raise RewardError(f"the sandbox failed: {error}") from error
        share = verdict.num_passed / verdict.num_tests
        earned = share if config.credit == "fraction" else float(share == 1)
        info = {"passed": share, "compiled": float(verdict.compiled), "ran": float(verdict.ran)}
        if isinstance(tests, FunctionTests) and tests.inside:
            info["checked_inside"] = len(tests.inside) / tests.num_tests
        return Score(value=config.wrong + earned * (config.correct - config.wrong), info=info)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _judge(self, answer: ProgramAnswer, tests: ProgramTests | FunctionTests) -> CodeVerdict:
        if isinstance(tests, ProgramTests):
            return await self._run_program(answer, tests)
        if answer.language != "python":
            return CodeVerdict()
        return await self._run_functions(answer, tests)

    async def _run_program(self, answer: ProgramAnswer, tests: ProgramTests) -> CodeVerdict:
        """One run a test: one after the other where the first failure decides, else as the sandbox has room."""
        if self._config.credit == "fraction":
            runs = await asyncio.gather(*(self._run(answer.source, stdin, answer.language) for stdin, _ in tests.cases))
        else:
            runs = []
            for stdin, stdout in tests.cases:
                runs.append(await self._run(answer.source, stdin, answer.language))
                if not self._prints(runs[-1], stdout):
                    break
        passed = [self._prints(ran, stdout) for ran, (_, stdout) in zip(runs, tests.cases, strict=False)]
        return CodeVerdict(
            num_passed=sum(passed),
            num_tests=len(tests.cases),
            compiled=_compiled(runs[0], answer.language),
            ran=all(ran.ok for ran in runs),
        )

    def _prints(self, ran: Ran, expected: str) -> bool:
        return ran.ok and same_output(expected, ran.stdout, tolerance=self._config.tolerance)

    async def _run_functions(self, answer: ProgramAnswer, tests: FunctionTests) -> CodeVerdict:
        """One run for all questions; one more for the tests that must run inside, unless the first has decided already."""
        stop_early = self._config.credit == "all"
        job = {"program": answer.source, "setup": tests.setup, "stop_early": stop_early}
        verdicts: list[CodeVerdict] = []
        if tests.questions:
            asked = {"questions": [question.ask for question in tests.questions], "call_s": self._config.call_s}
            ran = await self._drive("function_calls", {**job, **asked})
            # What a hostile program wrote may take a while to read: other samples go on meanwhile.
            verdicts.append(await asyncio.to_thread(_judge_replies, ran, tests.questions))
        if tests.inside and not (stop_early and any(verdict.num_passed < verdict.num_tests for verdict in verdicts)):
            verdicts.append(await self._run_inside(job, tests.inside))
        return CodeVerdict(
            num_passed=sum(verdict.num_passed for verdict in verdicts),
            num_tests=tests.num_tests,
            compiled=all(verdict.compiled for verdict in verdicts),
            ran=all(verdict.ran for verdict in verdicts),
        )

    async def _run_inside(self, job: Mapping[str, Any], tests: Sequence[SandboxedAssert]) -> CodeVerdict:
        asked = {
            "tests": [test.source for test in tests],
            "own": sorted({name for test in tests for name in test.own}),
            "modules": sorted({name for test in tests for name in test.modules}),
            "token": (token := secrets.token_hex()),
        }
        return _judge_inside(await self._drive("isolated_asserts", {**job, **asked}), tests, token=token)

    async def _drive(self, driver: str, job: dict[str, Any]) -> Ran:
        try:
            text = json.dumps(job)
        except (TypeError, ValueError) as error:
            raise RewardError(f"the arguments of a test cannot be written as JSON: {error}") from None
        return await self._run(_shipped(driver), text, "python")

    async def _run(self, source: str, stdin: str, language: Language) -> Ran:
        return await self._sandbox.run(Program(source=source, language=language, stdin=stdin, limits=self._limits))


def _judge_replies(ran: Ran, questions: Sequence[ProgramQuestion]) -> CodeVerdict:
    lines = read_replies(ran.stdout)
    replies = [as_reply(line) for line in lines[1:]]
    passed = [not reply.crashed and question.accepts(reply) for question, reply in zip(questions, replies, strict=False)]
    return CodeVerdict(
        num_passed=sum(passed),
        num_tests=len(questions),
        compiled=_loaded(lines),
        ran=len(replies) == len(questions) and not any(reply.crashed for reply in replies),
    )


def _judge_inside(ran: Ran, tests: Sequence[SandboxedAssert], *, token: str) -> CodeVerdict:
    lines = read_replies(ran.stdout, token=token)
    if lines and lines[0].get("broken") == ALONE:
        fix = "use a sandbox of level namespaces, or write asserts that compare one call with a constant"
        raise RewardError(f"tests such as {tests[0].source!r} need a process of their own, which this sandbox forbids ({fix})")
    num_passed = sum(line.get("passed") is True for line in lines[1:])
    return CodeVerdict(num_passed=num_passed, num_tests=len(tests), compiled=_loaded(lines), ran=ran.ok)


def _loaded(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the program was Python at all. One that died before a word was."""
    return not lines or lines[0].get("broken") not in ("SyntaxError", "IndentationError", "TabError")


def _compiled(ran: Ran, language: Language) -> bool:
    """Whether a program got past its compiler, as far as its last words tell."""
    return ran.ok or not (_PYTHON_SYNTAX if language == "python" else _CPP_SYNTAX).search(ran.stderr)


@cache
def _shipped(driver: str) -> str:
    """A driver's source as one program, with what it imports from here before it."""
    folder = resources.files(sandboxed)
    modules = [(f"{sandboxed.__name__}.{name}", (folder / f"{name}.py").read_text()) for name in ("wire", driver)]
    return _BOOT.format(modules=modules)
