"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

CALL_OPENS, _CALL_ENDS = "<tool_call>", "</tool_call>"
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


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a policy writes it."""
    return f"{CALL_OPENS}{json.dumps({'name': name, 'arguments': dict(arguments)}, ensure_ascii=False)}{_CALL_ENDS}"


def _read_call(block: str) -> Call | MalformedCall:
    try:
        call = _read_json(block)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        # As in OpenAI's API, where the arguments are JSON inside JSON.
        arguments = _read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"This call is not JSON ({error}). Write {_FORM}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedCall(f"This call is no JSON object with a name. Write {_FORM}")
    if not isinstance(arguments, dict):
        return MalformedCall(f"The arguments of this call are no JSON object. Write {_FORM}")
    return Call(call["name"], arguments)


def _read_json(text: str) -> Any:
    # Not strict: code in a call often has its line breaks as they are, not as \n.
    return json.loads(text, strict=False, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
