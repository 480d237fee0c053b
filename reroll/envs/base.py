"""The environment seam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from reroll.types import Message


class InvalidAction(Exception):
    """The policy's words are no action here. The message goes to the policy: it says what would be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an environment answers to an action."""

    messages: tuple[Message, ...] = ()
    """What the policy sees next; empty when the episode is over."""
    reward: float = 0.0
    terminated: bool = False
    """The task itself ended."""
    truncated: bool = False
    """A limit of the environment cut it."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers about this step, e.g. `effective` (1 if the action changed anything); `success` counts from the last one."""
    state: str | None = None
    """The state the policy acts in next: sibling episodes in equal states are compared. None: what it is shown decides."""


class Env(Protocol):
    """One episode of a task: reset once, step until it ends, close always. Plain or async; the runner awaits what is awaitable.

    Equal seeds and actions give equal episodes. Raise InvalidAction for words that are no action, EnvError to fail the
    sample with a reason. `actions` are the policy's words after parsing: without the thinking, tags and tool syntax.
    """

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The instance of this seed: its rules and first observation as chat messages."""

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


class AsyncEnv(Protocol):
    """An environment as an episode plays it, wherever it runs: its seed is settled and every call is awaited."""

    async def reset(self) -> tuple[Message, ...]: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...
