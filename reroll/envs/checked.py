"""Environments by their ids, and the check of everything they return."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, cast

import numpy as np

from reroll.config.envs import EnvConfig
from reroll.envs.base import Env, InvalidAction, StepResult
from reroll.envs.make import env_name, make_env
from reroll.errors import EnvError, RerollError
from reroll.runtime.children import last_lines
from reroll.types import Message

NOT_OPEN = "the environment is not open: reset it first, and step it no more after close"

_MAX_REASON_CHARS = 2000
"""A reason is a status on a sample, not a document."""
_LOOP_END_S = 1.0
"""How long the tasks of async environments may take to end once they are cancelled."""

_log = logging.getLogger(__name__)


class EnvHost:
    """Holds environments and calls them, each in the thread that asks. Safe to use from many threads.

    What an environment raises becomes EnvError naming the method; InvalidAction passes. What an async environment
    returns is awaited on a loop of the host, in a thread of its own.
    """

    def __init__(self, *, max_message_chars: int) -> None:
        self._max_message_chars = max_message_chars
        self._lock = threading.Lock()
        self._hosted: dict[int, _Hosted] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def open(self, env_id: int, node: EnvConfig, seed: int) -> tuple[Message, ...]:
        """Build the environment and reset it. If that fails, nothing of it is kept."""
        hosted = _Hosted(env_name(node))
        with self._lock:
            self._hosted[env_id] = hosted
        try:
            with blaming(hosted.name, "__init__"):
                hosted.env = make_env(node)
            with blaming(hosted.name, "reset"):
                messages = self._settled(hosted, hosted.env.reset(seed))
                return as_messages(messages, max_chars=self._max_message_chars)
        except BaseException:
            try:
                self.close(env_id)
            except EnvError as error:
                _log.warning("an environment that failed to open failed to close too: %s", error)
            raise

    def step(self, env_id: int, action: str) -> StepResult:
        """What the environment answers."""
        hosted = self._hosted.get(env_id)
        if hosted is None or hosted.env is None:
            raise EnvError(NOT_OPEN)
        with blaming(hosted.name, "step", max_chars=self._max_message_chars):
            return as_outcome(self._settled(hosted, hosted.env.step(action)), max_chars=self._max_message_chars)

    def close(self, env_id: int) -> None:
        """Close the environment and forget it. Safe to call for one that is not there."""
        with self._lock:
            hosted = self._hosted.pop(env_id, None)
        if hosted is not None and hosted.env is not None:
            close: Callable[[], Any] = hosted.env.close
            with blaming(hosted.name, "close"):
                self._settled(hosted, close())

    def interrupt(self, env_id: int) -> None:
        """Cancel what this environment awaits, if it does: its call then fails."""
        hosted = self._hosted.get(env_id)
        if hosted is not None and hosted.awaited is not None:
            hosted.awaited.cancel()

    def stop_loop(self) -> None:
        """End the thread of the loop. Safe to call twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._loop_thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._loop_thread.join(_LOOP_END_S)

    def _settled(self, hosted: _Hosted, value: Any) -> Any:
        """The value itself, or what it is once awaited."""
        if not inspect.isawaitable(value):
            return value
        hosted.awaited = asyncio.run_coroutine_threadsafe(_awaited(value), self._running_loop())
        try:
            return hosted.awaited.result()
        finally:
            hosted.awaited = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(target=_serve, args=(self._loop,), name="env loop", daemon=True)
                self._loop_thread.start()
            return self._loop


class _Hosted:
    """One environment of a host."""

    __slots__ = ("awaited", "env", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.env: Env | None = None
        self.awaited: Future[Any] | None = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # Its end cancels the tasks that are left.
        runner.get_loop().run_forever()


async def _awaited(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # Either would end the loop of all environments.
        raise EnvError(last_lines(error)) from error


class blaming:  # noqa: N801 (it reads as a statement)
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
            raise EnvError(_cut(f"{self._name}.{self._method} raised {last_lines(error)}", _MAX_REASON_CHARS)) from error


def as_messages(value: object, *, max_chars: int, may_be_none: bool = False) -> tuple[Message, ...]:
    """What an environment shows, as well-formed messages of bounded length. Raises EnvError for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EnvError(f"gave a {type(value).__name__} for its messages: give a tuple of messages")
    if not value and not may_be_none:
        raise EnvError("gave no message: the policy needs something to answer")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EnvError(f"gave {_shown(message)} as a message: give {{'role': 'user', 'content': '…'}}")
        if not isinstance(message.get("content"), str):
            raise EnvError(f"gave a message whose content is a {type(message.get('content')).__name__}: give a str")
    return tuple(_plain(message, max_chars) for message in value)


def as_outcome(value: object, *, max_chars: int) -> StepResult:
    """What a step returned, as a well-formed StepResult. Raises EnvError for anything else."""
    if not isinstance(value, StepResult):
        raise EnvError(f"returned a {type(value).__name__}: return an StepResult")
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


def _plain(message: Mapping[str, Any], max_chars: int) -> Message:
    """The message as plain data, its content cut to the limit: it has to travel, and to be stored."""
    content = message["content"]
    if len(message) == 2 and len(content) <= max_chars and type(content) is str and type(message) is dict:
        return cast(Message, message)
    try:
        return cast(Message, json.loads(json.dumps({**message, "content": _cut(content, max_chars)})))
    except (TypeError, ValueError) as error:
        raise EnvError(f"gave a message that is not plain data ({error}): give str, numbers, lists and dicts") from None


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: {len(text):,} characters in all]"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
