"""Rewards for how something was said, whatever was said. They look at all that the policy wrote, and belong into a stack."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.reward_base import RewardConfig
from reroll.errors import Violation
from reroll.types import Prompt, Score, Trajectory

# A very long word counts as several, so that `hahahahaha…` repeats itself.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]")
_SCRIPTS = {"HIRAGANA": "kana", "KATAKANA": "kana", "KATAKANA-HIRAGANA": "kana", "CJK": "han", "IDEOGRAPHIC": "han"}
"""Where the first word of a character's Unicode name is not the name of its script."""

Script = Literal[
    "latin", "greek", "cyrillic", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "han", "kana", "hangul"
]


class OverlongConfig(RewardConfig):
    """DAPO's soft punishment: 0 up to `max_tokens - buffer_tokens`, then falling evenly to -1 at `max_tokens`."""

    runs: ClassVar[str] = "reroll_zoo.text.penalties:Overlong"
    counts_tokens: ClassVar[bool] = True

    kind: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Tokens from which on the punishment is whole; all turns of an episode together."""
    buffer_tokens: int = Field(ge=1)
    """Tokens over which it grows."""

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        if self.buffer_tokens > self.max_tokens:
            problem = f"{self.buffer_tokens} is more than max_tokens {self.max_tokens}"
            yield Violation("buffer_tokens", problem, f"set it to at most {self.max_tokens}")


class RepetitionConfig(RewardConfig):
    """Minus the share of n-grams that were said before in the same turn: 0 for none, -1 for nothing else."""

    runs: ClassVar[str] = "reroll_zoo.text.penalties:Repetition"

    kind: Literal["repetition"] = "repetition"
    ngram: int = Field(default=4, ge=1)
    """Words that count as one thing said. Marks and characters of scripts without spaces are words of their own."""


class LanguageConfig(RewardConfig):
    """Minus the share of letters outside the expected scripts. Digits, marks and symbols do not count."""

    runs: ClassVar[str] = "reroll_zoo.text.penalties:Language"

    kind: Literal["language"] = "language"
    scripts: tuple[Script, ...] = Field(default=("latin",), min_length=1)
    """Japanese takes `[han, kana]`; formulas with Greek letters take `greek` beside their script."""


class LengthConfig(RewardConfig):
    """1 at the target, falling evenly to 0 at no tokens and at `max_tokens`. Without a target: the shorter, the better."""

    runs: ClassVar[str] = "reroll_zoo.text.penalties:Length"
    counts_tokens: ClassVar[bool] = True

    kind: Literal["length"] = "length"
    max_tokens: int = Field(ge=1)
    """Tokens that earn nothing any more; all turns of an episode together."""
    target_tokens: int | None = Field(default=None, ge=1)
    """Tokens that earn the most; null: the fewer, the better."""

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        if self.target_tokens and self.target_tokens >= self.max_tokens:
            problem = f"{self.target_tokens} is not below max_tokens {self.max_tokens}"
            yield Violation("target_tokens", problem, f"set it below {self.max_tokens}, or raise max_tokens")


class Overlong:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13), from 0 down to -1."""

    def __init__(self, config: OverlongConfig) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        excess = trajectory.num_completion_tokens - (config.max_tokens - config.buffer_tokens)
        return Score(value=min(max(-excess / config.buffer_tokens, -1.0), 0.0))


class Repetition:
    """Minus the share of n-grams that repeat an earlier one of their turn."""

    def __init__(self, config: RepetitionConfig) -> None:
        self._ngram = config.ngram

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        num_said = num_distinct = 0
        for turn in trajectory.turns:
            said = list(ngrams(_WORD.findall(turn.text.casefold()), self._ngram))
            num_said += len(said)
            num_distinct += len(set(said))
        return Score(value=num_distinct / num_said - 1.0 if num_said else 0.0)


class Language:
    """Minus the share of letters outside the expected scripts."""

    def __init__(self, config: LanguageConfig) -> None:
        self._scripts = frozenset(config.scripts)

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        letters: Counter[str] = Counter()
        for turn in trajectory.turns:
            # Compatibility forms hide a script: a full-width letter is a Latin one, and so is a bold one of mathematics.
            letters.update(filter(str.isalpha, unicodedata.normalize("NFKC", turn.text)))
        foreign = sum(count for letter, count in letters.items() if script_of(letter) not in self._scripts)
        return Score(value=-foreign / letters.total() if foreign else 0.0)


class Length:
    """How close the length comes to a target, from 0 to 1."""

    def __init__(self, config: LengthConfig) -> None:
        self._target = config.target_tokens or 0
        self._max_tokens = config.max_tokens

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        tokens = trajectory.num_completion_tokens
        if tokens < self._target:
            return Score(value=tokens / self._target)
        return Score(value=max(0.0, 1.0 - (tokens - self._target) / (self._max_tokens - self._target)))


def ngrams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """All runs of n words."""
    return zip(*(words[start:] for start in range(n)), strict=False)


@cache
def script_of(letter: str) -> str:
    """The script a letter belongs to, as Unicode's name for the letter says: `latin`, `cyrillic`, `han`, …"""
    first = unicodedata.name(letter, "unknown").partition(" ")[0]
    return _SCRIPTS.get(first, first.lower())
