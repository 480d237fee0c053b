"""A language model that rewards ask, whoever it is and wherever it runs: one awaitable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reroll.errors import RewardError
from reroll.types import Message, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model replied, and what it cost."""

    text: str
    is_whole: bool = True
    """Whether the model ended it: one that was cut off may end inside of a quotation."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Complete(Protocol):
    """Asks a model."""

    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        """Its reply; RewardError, with the reason, if there is none to be had: Unreadable if the messages may be why."""

    async def close(self) -> None:
        """Let go of what it holds. Safe to call twice."""


class Unreadable(RewardError):
    """A question that the model will not read: too long for it, or refused."""
