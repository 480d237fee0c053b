"""The environment seam. Single-turn tasks are episodes that end at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reroll.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an environment answers to an action."""

    messages: tuple[Message, ...] = ()
    """What the policy sees next; empty when the episode is over."""
    reward: float = 0.0
    terminated: bool = False
    """The task itself ended."""
    truncated: bool = False
    """A limit of the environment cut it."""


class Env(Protocol):
    """One episode: reset once, step until it ends, close always. Raise EnvError to fail the sample with a reason."""

    async def reset(self) -> tuple[Message, ...]: ...

    async def step(self, action: str) -> Outcome: ...

    async def close(self) -> None: ...


class SingleTurn:
    """Shows the prompt, takes one answer, ends. The reward comes from the domain's Reward."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def reset(self) -> tuple[Message, ...]:
        return self.prompt.messages

    async def step(self, action: str) -> Outcome:
        return Outcome(terminated=True)

    async def close(self) -> None:
        return None
