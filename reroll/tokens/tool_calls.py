"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

CALL_OPENS, _CALL_ENDS = "<tool_call>", "</tool_call>"
_MAX_NESTED = 50
"""Objects and lists within each other. Python reads some that it then can neither write nor send."""
_FORM = '<tool_call>{"name": "tool name", "arguments": {"argument name": value}}</tool_call>'


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was written: neither the tool nor its arguments need exist."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Words that were meant to be a call. `problem` is for the policy: it says what is wrong and what would be right."""

    problem: str


def find_calls(text: str) -> list[Call | MalformedCall]:
    """The calls in a turn, in order. The last one need not be closed: many models end their turn instead."""
    return [_read_call(part.partition(_CALL_ENDS)[0]) for part in text.split(CALL_OPENS)[1:]]


def write_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as a policy writes it. Arguments may be text, which who reads the call takes for JSON."""
    given = arguments if isinstance(arguments, str) else dict(arguments)
    return f"{CALL_OPENS}{json.dumps({'name': name, 'arguments': given}, ensure_ascii=False)}{_CALL_ENDS}"


def read_json(text: str) -> Any:
    """JSON in a policy's words, whose line breaks may stand as they are. Raises ValueError for what is none, and for what would
    be a fault further on: numbers that are none, halves of characters, endless nesting."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _is_nested(value):
        raise ValueError(f"it is nested more than {_MAX_NESTED} deep")
    if r"\ud" in text.lower():  # Where half a character can have come from. To encode it raises a ValueError.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _read_call(block: str) -> Call | MalformedCall:
    try:
        call = read_json(block)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        # As in OpenAI's API, where the arguments are JSON inside JSON.
        arguments = read_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return MalformedCall(f"This call is not JSON ({error}). Write {_FORM}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedCall(f"This call is no JSON object with a name. Write {_FORM}")
    if not isinstance(arguments, dict):
        return MalformedCall(f"The arguments of this call are no JSON object. Write {_FORM}")
    return Call(call["name"], arguments)


def _is_nested(value: Any) -> bool:
    """Whether it is deeper than anybody can mean."""
    layer = [value]
    for _ in range(_MAX_NESTED):
        inside = [node.values() if isinstance(node, dict) else node for node in layer if isinstance(node, dict | list)]
        layer = [item for items in inside for item in items]
    return bool(layer)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
