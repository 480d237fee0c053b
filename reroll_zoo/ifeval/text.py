"""Taking a text apart: words, sentences, blocks. Every pattern here takes linear time, whatever the policy writes."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_SPELLED_WORD = re.compile(r"\w+(?:[-'’.&]\w+)*")
# A run of marks ends a sentence where a space follows, perhaps after closing quotes; so 3.14 and example.org end none.
# The first look-behind makes a run start only once, so that a long one is not scanned again from each of its marks.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|$)|[。！？।۔]++")
_LOOK_BACK = 24
"""Characters in front of a full stop that can hold an abbreviation or the number of a list."""
_TITLES = ("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "capt", "lt", "sgt", "rev")
_NEVER_LAST = frozenset((*_TITLES, "vs", "e.g", "i.e", "cf", "approx", "p.s", "p.p.s"))
"""Abbreviations that stand before what they belong to: no sentence ends with them."""
_SELDOM_LAST = frozenset(("etc", "inc", "ltd", "corp", "al"))
"""Abbreviations, besides dotted ones such as a.m. and U.S., that end a sentence only where the next word is not lower-case."""
_ELLIPSIS = re.compile(r"(?:\.{2,}+|…++)[\"'”’»)\]*_]*+")
_GOES_ON = re.compile(r"\s+[\"'“‘«(\[*_]*+[^\W\d_]")
_DOTTED = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores; `don't` counts as two, as in IFEval."""
    return len(_WORD.findall(text))


def spelled_words(text: str) -> list[str]:
    """Words as people see them: `COVID-19`, `U.S` and `don't` are one each."""
    return _SPELLED_WORD.findall(text)


def count_sentences(text: str) -> int:
    """Stretches that hold a word and end with a mark, or with the text. Abbreviations, initials and list numbers end none, nor
    do dots that only pause: `has... an ego`."""
    starts, ends = [0], []
    for mark in _SENTENCE_END.finditer(text):
        if not _is_abbreviated(text, mark) and not _is_pause(text, mark):
            ends.append(mark.end())
            starts.append(mark.end())
    ends.append(len(text))
    return sum(_WORD.search(text, start, end) is not None for start, end in zip(starts, ends, strict=True))


def _is_abbreviated(text: str, mark: re.Match[str]) -> bool:
    """Whether a full stop belongs to the word before it and the sentence goes on."""
    if mark[0] != ".":
        return False
    before = text[max(0, mark.start() - _LOOK_BACK) : mark.start()]
    word = before.split()[-1].lstrip("(['\"“‘*_") if before.strip() else ""
    if word.isdigit():
        return before.rpartition("\n")[2].strip() == word
    if word.lower() in _NEVER_LAST or (len(word) == 1 and word.isupper() and word != "I"):
        return True
    if word.lower() in _SELDOM_LAST or _DOTTED.fullmatch(word):
        return text[mark.end() : mark.end() + 2].strip().islower()
    return False


def _is_pause(text: str, mark: re.Match[str]) -> bool:
    """Whether dots stand inside a sentence: the next word begins small."""
    follows = _GOES_ON.match(text, mark.end(), mark.end() + _LOOK_BACK) if _ELLIPSIS.fullmatch(mark[0]) else None
    return follows is not None and follows[0][-1].islower()


def divided(text: str, divider: str) -> list[str]:
    """The stripped blocks between dividers; blank ones at the very start and end are dropped."""
    blocks = [block.strip() for block in text.split(divider)]
    first = 0 if blocks[0] else 1
    last = len(blocks) if blocks[-1] else len(blocks) - 1
    return blocks[first:last]
