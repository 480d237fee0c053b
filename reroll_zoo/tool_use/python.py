"""The tool `python`: code of the policy's, run in the sandbox within limits of time, memory and output."""

from __future__ import annotations

from typing import Any

from reroll_zoo.sandbox.base import Limits, Program, Ran
from reroll_zoo.sandbox.blocking import shared_sandbox
from reroll_zoo.sandbox.config import SandboxConfig
from reroll_zoo.tool_use.tool import Tool, ToolError

_OUTPUT_KB = 256


def python_tool(*, memory_mb: int, sandbox: SandboxConfig) -> Tool:
    """The tool as a policy sees it: what the code prints, or the end of what went wrong.

    Raises SandboxError with the fix if there is no such sandbox on this machine.
    """
    box = shared_sandbox(sandbox)

    def run(arguments: dict[str, Any], timeout_s: float) -> str:
        limits = Limits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb, output_kb=_OUTPUT_KB)
        ran = box.run(Program(source=arguments["code"], limits=limits))
        printed = ran.stdout.strip()
        if not ran.ok:
            raise ToolError(f"{printed}\n{_last_words(ran, timeout_s)}".strip())
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


def _last_words(ran: Ran, timeout_s: float) -> str:
    """What went wrong; of a traceback the place and the error: the line numbers of the code, then what was raised."""
    if ran.status == "timeout":
        return f"The code took more than {timeout_s:g} s and was stopped."
    if ran.status == "output":
        return f"The code wrote more than {_OUTPUT_KB} kB and was stopped."
    lines = ran.stderr.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith('File "main.py"')]
    if lines:
        return "\n".join([*places[-1:], lines[-1]])
    if ran.status == "memory":
        return "The code used more memory than it may and was stopped."
    return f"The code was ended by signal {-ran.exit_code}." if ran.exit_code < 0 else "The code failed without a word."
