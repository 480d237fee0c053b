"""Rewards for how something was said, whatever was said. They look at all that the policy wrote, and belong into a stack."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.reward_base import RewardConfig

Script = Literal[
    "latin", "greek", "cyrillic", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "han", "kana", "hangul"
]


class OverlongReward(RewardConfig):
    """DAPO's soft punishment: 0 up to `max_tokens - buffer_tokens`, then falling evenly to -1 at `max_tokens`."""

    runs: ClassVar[str] = "reroll.rewards.penalties:Overlong"

    kind: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Tokens from which on the punishment is whole; all turns of an episode together."""
    buffer_tokens: int = Field(ge=1)
    """Tokens over which it grows."""


class RepetitionReward(RewardConfig):
    """Minus the share of n-grams that were said before in the same turn: 0 for none, -1 for nothing else."""

    runs: ClassVar[str] = "reroll.rewards.penalties:Repetition"

    kind: Literal["repetition"] = "repetition"
    ngram: int = Field(default=4, ge=1)
    """Words that count as one thing said. Marks and characters of scripts without spaces are words of their own."""


class LanguageReward(RewardConfig):
    """Minus the share of letters outside the expected scripts. Digits, marks and symbols do not count."""

    runs: ClassVar[str] = "reroll.rewards.penalties:Language"

    kind: Literal["language"] = "language"
    scripts: tuple[Script, ...] = Field(default=("latin",), min_length=1)
    """Japanese takes `[han, kana]`; formulas with Greek letters take `greek` beside their script."""


class LengthReward(RewardConfig):
    """1 at the target, falling evenly to 0 at no tokens and at `max_tokens`. Without a target: the shorter, the better."""

    runs: ClassVar[str] = "reroll.rewards.penalties:Length"

    kind: Literal["length"] = "length"
    max_tokens: int = Field(ge=1)
    """Tokens that earn nothing any more; all turns of an episode together."""
    target_tokens: int | None = Field(default=None, ge=1)
    """Tokens that earn the most; null: the fewer, the better."""
