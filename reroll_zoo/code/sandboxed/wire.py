"""How values and programs travel in and out of the sandbox.

Values are JSON: lists, text, numbers, true, false and null as themselves, other types as an object with one tag. JSON is read
in bounded depth and linear time whatever a hostile program writes, which Python's own literals are not.
"""

from __future__ import annotations

import json
import numbers
import os
import sys
import types
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MAX_DEPTH = 64
"""Deeper values, circular ones among them, do not travel."""
MAX_PLAIN_BITS = 1024
"""Larger numbers are written in base 16: Python bounds how many decimal digits it reads."""
MAX_DECIMAL_CHARS = 1000
"""A longer Decimal is nobody's answer, and slow to read."""
MAX_SAME_HASH = 64
"""How many members of a set, or keys of a dict, may share a hash. Whoever makes more means them to: a table of such numbers
takes time squared to build."""


def encode(value: Any, other: Callable[[Any], Any], depth: int = 0) -> Any:
    """The value as JSON can carry it; `other` stands in for what is not made of Python's own plain types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if whole.bit_length() <= MAX_PLAIN_BITS else {"int": hex(whole)}
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Decimal) and value.is_finite() and len(text := str(value)) <= MAX_DECIMAL_CHARS:
        return {"decimal": text}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if depth >= MAX_DEPTH:
        return {"opaque": "a value nested too deep"}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other, depth + 1), encode(item, other, depth + 1)] for key, item in value.items()]}
    for kind, tag in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if isinstance(value, kind):
            items = [encode(item, other, depth + 1) for item in value]
            return items if kind is list else {tag: items}
    return other(value)


def decode(wire: Any, other: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The value that JSON carried; `other(tag, content)` reads what `encode` left to its `other`.

    Raises ValueError, TypeError or AttributeError for what `encode` cannot have written.
    """
    if depth > MAX_DEPTH + 1:
        raise ValueError("nested too deep")
    if isinstance(wire, list):
        return [decode(item, other, depth + 1) for item in wire]
    if not isinstance(wire, dict):
        return wire
    if len(wire) != 1:
        raise ValueError("not an object with one tag")
    ((tag, content),) = wire.items()
    if tag == "tuple":
        return tuple(decode(item, other, depth + 1) for item in content)
    if tag == "set":
        return frozenset(_hashable([decode(item, other, depth + 1) for item in content]))
    if tag == "dict":
        keys = _hashable([decode(key, other, depth + 1) for key, _ in content])
        return dict(zip(keys, (decode(item, other, depth + 1) for _, item in content), strict=True))
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "int":
        return int(content, 16)
    if tag == "decimal":
        return _decimal(content)
    if tag == "complex":
        return complex(*content)
    return other(tag, content)


def _decimal(text: str) -> Decimal:
    number = Decimal(text) if len(text) <= MAX_DECIMAL_CHARS else None
    if number is None or not number.is_finite():
        raise ValueError("no number that a Decimal would be sent for")
    return number


def _hashable(members: list[Any]) -> list[Any]:
    """The members, if a table can be made of them in linear time; else ValueError, or TypeError for what has no hash."""
    # Sorted: a table of their hashes would be as slow as the one that it is to prevent.
    hashes = sorted(map(hash, members))
    if any(first == last for first, last in zip(hashes, hashes[MAX_SAME_HASH:], strict=False)):
        raise ValueError("too many members with one hash")
    return members


def load(program: str, setup: str) -> dict[str, Any]:
    """The names that a program defines, run as an imported module: its `__main__` part does not run.

    A setup that lacks a name before the program, such as one that builds a tree of its nodes, runs after it.
    """
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    names = module.__dict__
    late = ""
    try:
        exec(compile(setup, "<setup>", "exec"), names)
    except NameError:
        late = setup
    exec(compile(program, "<answer>", "exec"), names)
    exec(compile(late, "<setup>", "exec"), names)
    return names


def take_stdio() -> int:
    """From here on what anyone prints is not our output, and there is nothing to read. Returns the stdout that was."""
    out = os.dup(1)
    end_of_file, writer = os.pipe()
    os.close(writer)
    os.dup2(end_of_file, 0)
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError:
        # Some sandboxes let no file be written, not even this one.
        os.dup2(2, 1)
    return out


def tell(out: int, reply: dict[str, Any], *, token: str = "") -> None:
    """Write one line, whole."""
    line = (token + json.dumps(reply) + "\n").encode()
    while line:
        line = line[os.write(out, line) :]
