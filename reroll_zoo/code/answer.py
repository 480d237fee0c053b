"""Finding the program in what the policy wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from reroll_zoo.sandbox.base import Language

_TAGS: dict[str, Language] = {
    "python": "python", "py": "python", "python3": "python", "cpp": "cpp", "c++": "cpp", "cc": "cpp", "cxx": "cpp",
}  # fmt: skip
# Possessive, so that a long line is read once: what the tag has taken is not tried again as its rest.
_FENCE = re.compile(r"[ \t]{0,3}+(?P<ticks>`{3,}+)[ \t]*+(?P<tag>[^\s`]*+)[^`]*+")


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """A program and what it is written in."""

    source: str
    language: Language


def find_answer(
    text: str, *, language: Literal["python", "cpp", "auto"], after: str, require_fence: bool
) -> ProgramAnswer | None:
    """The program: the last fenced block of the language, else the last fenced block, else all of the text.

    Only what follows the last `after` counts. None if nothing is left, or if there is no fence and one is required.
    """
    if after:
        _, found, text = text.rpartition(after)
        if not found:
            return None
    blocks = fenced_blocks(text)
    wanted = [block for block in blocks if block[0] is not None and language in ("auto", block[0])]
    if not blocks and require_fence:
        return None
    tag, source = (wanted or blocks or [(None, text)])[-1]
    if not source.strip():
        return None
    return ProgramAnswer(source, _language(tag, source) if language == "auto" else language)


def fenced_blocks(text: str) -> list[tuple[Language | None, str]]:
    """(language, code) of every block between ``` fences; a fence that stays open reaches to the end."""
    blocks: list[tuple[Language | None, str]] = []
    ticks, tag, lines = "", "", list[str]()
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if not ticks and fence:
            ticks, tag, lines = fence["ticks"], fence["tag"].lower(), []
        elif ticks and fence and fence["ticks"].startswith(ticks) and line.strip() == fence["ticks"]:
            blocks.append((_TAGS.get(tag), "\n".join(lines)))
            ticks = ""
        elif ticks:
            lines.append(line)
    if ticks:
        blocks.append((_TAGS.get(tag), "\n".join(lines)))
    return blocks


def _language(tag: Language | None, source: str) -> Language:
    return tag or ("cpp" if "#include" in source else "python")
