"""Drafts: guesses at the next tokens of a sequence, which an engine reads in one step with the newest token.

A token is a function of seed, position and weights, so a guess is right exactly if it is the token that is drawn. An engine
draws at each of the places, and keeps what it drew up to the first wrong guess: the same tokens as without, in fewer steps. A
poor guess costs time and nothing else. What guesses is an entry point of the group `reroll.drafts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reroll.infer.sequence import SequenceState

MAX_DRAFT = 8
"""Tokens of one draft."""


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Guesses at the next tokens, and the kind of each."""

    tokens: tuple[int, ...] = ()
    kinds: tuple[tuple[int, int], ...] = ()


NO_DRAFT = DraftedTokens()


class Drafter(Protocol):
    """Drafts for the requests of one engine."""

    def join(self, sequence: SequenceState) -> None:
        """A request has come."""

    def leave(self, sequence: SequenceState) -> None:
        """A request has ended."""

    def draft(self, sequence: SequenceState, *, max_tokens: int, least: float) -> DraftedTokens:
        """At most so many tokens, each of which is drawn with a probability of at least `least`."""

    def learn(self, draft: DraftedTokens, *, num_right: int, num_known: int) -> None:
        """Of the first `num_known` guesses so many were right, one after the other."""


class DraftPace(Protocol):
    """Decides how bold drafts are."""

    def bar(self, num_running: int) -> float | None:
        """How likely a guess must be now; None: no drafts."""

    def stepped(self, num_running: int, *, num_tokens: int) -> None:
        """A step is over that wrote so many tokens, and read nothing but what was written last, and drafts."""

    def interrupted(self) -> None:
        """What comes next says nothing of how long a step takes."""
