"""The tool `python`: code in an interpreter of its own, within limits of time, memory and output.

The limits keep an honest policy's mistakes from doing harm. They are no sandbox: the code may read files and use the network.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from reroll.envs.tools.tool import Tool, ToolError

_MAX_OUTPUT_KB = 256
# A shell sets the limits, then becomes the interpreter: cheaper than a second interpreter, and safe beside threads.
_START = 'ulimit -t "$1"; ulimit -f "$2"; ulimit -v "$3"; shift 3; exec "$@"'
# No user folder and no working directory on the search path. The code is on standard input: its tracebacks name no file.
_INTERPRETER = (sys.executable, "-s", "-P", "-B", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a piece of code."""

    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that ended it."""
    timed_out: bool

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


def run_python(code: str, timeout_s: float, memory_mb: int) -> Result:
    """Run `code` in a process of its own, in an empty folder and a bare environment, and end all that it started.

    Equal code gives equal output unless it asks for the time or for chance. Output beyond 256 kB is lost.
    """
    limits = [math.ceil(timeout_s) + 1, _MAX_OUTPUT_KB * 2, memory_mb * 1024]
    command = ["/bin/sh", "-c", _START, "sh", *map(str, limits), *_INTERPRETER]
    with (
        tempfile.TemporaryDirectory(prefix="reroll-python-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        source.write(code.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            command, stdin=source, stdout=stdout, stderr=stderr, cwd=folder, env=_environment(folder), start_new_session=True
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Result(stdout=_text(stdout), stderr=_text(stderr), exit_code=process.returncode, timed_out=timed_out)


def python_tool(*, memory_mb: int) -> Tool:
    """The tool as a policy sees it: what the code prints, or the end of what went wrong."""

    def run(arguments: dict[str, Any], timeout_s: float) -> str:
        result = run_python(arguments["code"], timeout_s, memory_mb)
        printed = result.stdout.strip()
        if result.timed_out:
            raise ToolError(f"{printed}\nThe code took more than {timeout_s:g} s and was stopped.".strip())
        if not result.ok:
            raise ToolError(f"{printed}\n{_last_words(result)}".strip())
        return printed or "The code printed nothing: print what you want to see."

    return Tool(
        name="python",
        description="Run Python code. Returns what it prints.",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
        run=run,
    )


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours, where passwords may be; one order of sets in every run; no thread pools, whose stacks cost memory."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    return {**one_thread, **fixed}


def _last_words(result: Result) -> str:
    """The place and the error of a traceback: the line numbers of the code, then what was raised."""
    lines = result.stderr.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith('File "<stdin>"')]
    if lines:
        return "\n".join([*places[-1:], lines[-1]])
    return f"The code was ended by signal {-result.exit_code}." if result.exit_code < 0 else "The code failed without a word."


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT_KB * 1024).decode(errors="replace")
