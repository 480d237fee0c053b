"""Regular expressions of a user's, on texts of the policy's, in a process that must not stop.

A pattern that is right on every text the user thought of may take for ever on one that the policy finds. Patterns of our own
are written so that they cannot (possessive quantifiers, bounded texts); a user's is given up after a while, and other threads
run meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

PATIENCE_S = 1.0
"""How long a user's pattern may search one text: thousands of times what an ordinary one takes."""


def all_matches(pattern: str, text: str) -> list[str | None]:
    """The first group of each of the pattern's matches, or all of it if it has none; nothing if it takes too long."""
    compiled = _compiled(pattern)
    try:
        return [match[1 if compiled.groups else 0] for match in compiled.finditer(text, timeout=PATIENCE_S, concurrent=True)]
    except TimeoutError:
        return []


def last_match(pattern: str, text: str) -> str | None:
    """The last of `all_matches`; None if there is none."""
    found = all_matches(pattern, text)
    return found[-1] if found else None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)
