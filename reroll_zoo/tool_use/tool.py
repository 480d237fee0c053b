"""A tool, and how one is made from a Python function."""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reroll.tokens.tool_calls import Call
from reroll.types import ToolSchema
from reroll_zoo.tool_use.schema import describe_function, find_problem


class ToolError(Exception):
    """A call that gave no result. The message goes to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    run: Callable[[dict[str, Any], float], str]
    """Arguments that fit the schema, and the seconds it may take. Raises ToolError."""

    @property
    def schema(self) -> ToolSchema:
        """What the policy is told about it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def run_call(tools: Mapping[str, Tool], call: Call, *, timeout_s: float) -> str:
    """The result of a call. Raises ToolError if there is no such tool, if the arguments do not fit, or if the tool fails."""
    tool = tools.get(call.name)
    if tool is None:
        raise ToolError(f"There is no tool {call.name!r}. There is: {', '.join(tools)}.")
    problem = find_problem(call.arguments, tool.parameters)
    if problem is not None:
        raise ToolError(f"The arguments of {call.name} do not fit: {problem}.")
    return tool.run(call.arguments, timeout_s)


def function_tool(function: Callable[..., Any]) -> Tool:
    """A plain or async function as a tool. Raises ValueError if its signature cannot be described.

    What it raises becomes a ToolError. Each call runs in a thread of its own: one that hangs is left behind when its time is
    over, for nothing can stop it.
    """
    description, parameters = describe_function(function)

    def run(arguments: dict[str, Any], timeout_s: float) -> str:
        ending: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                result = function(**arguments)
                ending.put((asyncio.run(result) if inspect.iscoroutine(result) else result, None))
            except BaseException as error:  # In the policy's hands: even SystemExit is only a failed call.
                ending.put((None, error))

        threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
        try:
            result, error = ending.get(timeout=timeout_s)
        except queue.Empty:
            raise ToolError(f"{function.__name__} took more than {timeout_s:g} s and was stopped.") from None
        if error is not None:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return Tool(name=function.__name__, description=description, parameters=parameters, run=run)
