"""Rewards for how something was said: pure functions of all that the policy wrote."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from reroll.config.reward_penalties import LanguageReward, LengthReward, OverlongReward, RepetitionReward
from reroll.types import Prompt, Score, Trajectory

# A very long word counts as several, so that `hahahahaha…` repeats itself.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]")
_SCRIPTS = {"HIRAGANA": "kana", "KATAKANA": "kana", "KATAKANA-HIRAGANA": "kana", "CJK": "han", "IDEOGRAPHIC": "han"}
"""Where the first word of a character's Unicode name is not the name of its script."""


class Overlong:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13), from 0 down to -1."""

    def __init__(self, config: OverlongReward) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        excess = trajectory.num_completion_tokens - (config.max_tokens - config.buffer_tokens)
        return Score(value=min(max(-excess / config.buffer_tokens, -1.0), 0.0))


class Repetition:
    """Minus the share of n-grams that repeat an earlier one of their turn."""

    def __init__(self, config: RepetitionReward) -> None:
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

    def __init__(self, config: LanguageReward) -> None:
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

    def __init__(self, config: LengthReward) -> None:
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
