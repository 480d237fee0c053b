"""What rewards that compare answers begin with: the row's reference, and the part of a text that is the answer."""

from __future__ import annotations

import re
from collections import deque

from reroll.errors import RewardError
from reroll.types import Prompt


def reference(prompt: Prompt) -> str:
    """The reference answer, which these rewards cannot do without."""
    if prompt.answer is None:
        raise RewardError(f"prompt {prompt.id} has no reference answer: set answer_key of its source, or use another reward")
    return prompt.answer


def extract(text: str, pattern: str | None) -> str | None:
    """The answer in a text: the first group (or all) of the pattern's last match; all of the text without a pattern."""
    if pattern is None:
        return text
    last = last_match(re.compile(pattern), text)
    if last is None:
        return None
    return last[1] if last.re.groups else last[0]


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Where a pattern matches last; None if it does nowhere."""
    kept = deque(pattern.finditer(text), maxlen=1)
    return kept[0] if kept else None
