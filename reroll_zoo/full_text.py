"""What full-text searches with SQLite's FTS5 begin with: the words of a query, and the expression that asks for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

TOKENIZE = "porter unicode61"
"""How an index cuts texts into words: by Unicode, and without English endings."""
_MAX_WORDS, _MAX_WORD_CHARS = 32, 40
_WORD = re.compile(r"[^\W_]+")
_COMMON_WORDS = frozenset(
    (
        "a",
        "an",
        "and",
        "are",
        "by",
        "for",
        "from",
        "in",
        "is",
        "of",
        "on",
        "or",
        "our",
        "the",
        "to",
        "was",
        "what",
        "which",
        "who",
        "with",
    )
)
"""Which tell little, and cost most to look for."""


def query_words(query: str) -> tuple[str, ...]:
    """The words that are searched for: lower case, each once, without operators, overlong words and the commonest ones."""
    words = dict.fromkeys(word for word in _WORD.findall(query.lower()) if len(word) <= _MAX_WORD_CHARS)
    return tuple(word for word in words if word not in _COMMON_WORDS)[:_MAX_WORDS]


def all_of(words: Iterable[str]) -> str:
    """Finds texts with every one of the words."""
    return " AND ".join(f'"{word}"' for word in words)


def any_of(words: Iterable[str]) -> str:
    """Finds texts with at least one of the words."""
    return " OR ".join(f'"{word}"' for word in words)
