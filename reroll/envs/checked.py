"""The check of everything that an environment raises and returns."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from reroll.config.registry import load_entry
from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError, RerollError, short_error
from reroll.types import Message

_MAX_REASON_CHARS = 2000
"""A reason is a status on a sample, not a document."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""What a policy can write as an escape in JSON, an environment echo, and no tokenizer read."""


class as_env_error:  # noqa: N801 (it reads as a statement)
    """Everything that is raised inside becomes EnvError naming the environment's method.

    Where an action is tried, InvalidAction passes, its message cut to `max_chars` like every other.
    """

    __slots__ = ("_max_chars", "_method", "_name")

    def __init__(self, name: str, method: str, *, max_chars: int | None = None) -> None:
        self._name, self._method, self._max_chars = name, method, max_chars

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        if isinstance(error, InvalidAction) and self._max_chars is not None:
            if len(str(error)) > self._max_chars:
                raise InvalidAction(_cut(str(error), self._max_chars)) from None
        elif isinstance(error, RerollError):
            raise EnvError(_cut(f"{self._name}.{self._method}: {error}", _MAX_REASON_CHARS)) from error
        elif isinstance(error, Exception | SystemExit):
            raise EnvError(_cut(f"{self._name}.{self._method} raised {short_error(error)}", _MAX_REASON_CHARS)) from error


def as_messages(value: object, *, max_chars: int, may_be_none: bool = False) -> tuple[Message, ...]:
    """What an environment shows, as well-formed messages of bounded length. Raises EnvError for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EnvError(f"gave a {type(value).__name__} for its messages: give a tuple of messages")
    if not value and not may_be_none:
        raise EnvError("gave no message: the policy needs something to answer")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EnvError(f"gave {_shown(message)} as a message: give {{'role': 'user', 'content': '…'}}")
        if not isinstance(message.get("content"), str | list):
            raise EnvError(f"gave a message whose content is a {type(message.get('content')).__name__}: give a str")
    return tuple(_plain(_without_parts(message), max_chars) for message in value)


def as_step_result(value: object, *, max_chars: int) -> StepResult:
    """What a step returned, as a well-formed StepResult. Raises EnvError for anything else."""
    if not isinstance(value, StepResult):
        raise EnvError(f"returned a {type(value).__name__}: return a StepResult")
    messages = as_messages(value.messages, max_chars=max_chars, may_be_none=True)
    flags: tuple[object, object] = value.terminated, value.truncated
    if not all(isinstance(flag, bool | np.bool_) for flag in flags):
        raise EnvError(f"gave terminated {_shown(flags[0])} and truncated {_shown(flags[1])}: give True or False")
    if not messages and not any(flags):
        raise EnvError("gave no message and did not end the episode: show the policy something, or end it")
    state: object = value.state
    if state is not None and not isinstance(state, str):
        raise EnvError(f"gave a state that is a {type(state).__name__}: give a str or None")
    if state is not None and len(state) > max_chars:
        raise EnvError(f"gave a state of {len(state):,} characters: give a short name for it")
    info: object = value.info
    if not isinstance(info, Mapping):
        raise EnvError(f"gave an info that is a {type(info).__name__}: give a dict of numbers")
    return StepResult(
        messages=messages,
        reward=_finite(value.reward, "reward"),
        terminated=bool(flags[0]),
        truncated=bool(flags[1]),
        info={str(name): _finite(number, f"info {name}") for name, number in info.items()},
        state=None if state is None else str(state),
    )


def _finite(number: object, what: str) -> float:
    if type(number) is not float:
        if not isinstance(number, numbers.Real | np.bool_):
            raise EnvError(f"gave a {what} that is a {type(number).__name__}: give a number")
        try:
            number = float(number)
        except OverflowError:
            raise EnvError(f"gave a {what} that is too large for a float") from None
    if not math.isfinite(number):
        raise EnvError(f"gave the {what} {number}: give a finite number")
    return number


def _without_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is a list of text and pictures, with its content as text and the pictures beside it."""
    if isinstance(message["content"], str):
        return message
    try:
        text, images = load_entry("reroll.vision", "parts")(message["content"])
    except ValueError as error:
        raise EnvError(f"gave a message whose content is wrong: {error}") from error
    return {**message, "content": text} | ({"images": images} if images else {})


def _plain(message: Mapping[str, Any], max_chars: int) -> Message:
    """The message as plain data in whole characters, its content cut to the limit: it has to travel, and to be stored."""
    content = message["content"]
    is_plain = type(message) is dict and type(content) is str and type(message["role"]) is str
    if is_plain and len(message) == 2 and len(content) <= max_chars and not _HALF_CHARACTER.search(content):
        return cast(Message, message)
    try:
        text = json.dumps({**message, "content": _cut(content, max_chars)}, ensure_ascii=False)
        return cast(Message, json.loads(_HALF_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", text)))
    except (TypeError, ValueError) as error:
        raise EnvError(f"gave a message that is not plain data ({error}): give str, numbers, lists and dicts") from None


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: {len(text):,} characters in all]"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
