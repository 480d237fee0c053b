"""Which prompts are worth the next try, by how often they passed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reroll.observe.metrics import Stats
from reroll.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Prompts of one domain that are of one difficulty, by the data's own count."""

    domain: str
    number: int
    prompts: Sequence[Prompt]


class Curriculum:
    """Everything is open and every prompt is worth a try. Kinds of curricula narrow that.

    The same feedback in the same order gives the same answers: all chance comes from the caller, as `luck`.
    """

    def is_open(self, domain: str, level: int) -> bool:
        """Whether prompts of this level are drawn yet."""
        return True

    def admits(self, prompt: Prompt, luck: float) -> bool:
        """Whether the prompt is drawn, now that it is its turn; `luck` is anywhere between 0 and 1. Asked once a visit."""
        return True

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """A group of this prompt was trained on or dropped; this is what its samples earned, at least one."""

    def state(self) -> dict[str, Any]:
        """All that was learned, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of the same kind."""

    def stats(self) -> Stats:
        """How things stand."""
        return Stats()
