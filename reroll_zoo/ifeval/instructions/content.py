"""Things that an answer must have in it."""

from __future__ import annotations

import re
from typing import Any

from reroll_zoo.ifeval.instruction import Count, Dice, Draft, Instruction, Phrase
from reroll_zoo.ifeval.words import PLACEHOLDER_SENTENCE, PLACEHOLDERS, POSTSCRIPT, POSTSCRIPT_MARKERS

_PLACEHOLDER = re.compile(r"\[([^\[\]\n]*+)\]")


class NumberPlaceholders(Instruction):
    """At least so many placeholders such as `[address]`. `[]` is none."""

    id = "detectable_content:number_placeholders"
    phrases = (
        "Include at least {num_placeholders} placeholders in square brackets, such as [address].",
        "Leave {num_placeholders} or more blanks for me to fill in, written like [this].",
        "Your answer must contain at least {num_placeholders} placeholders like [colour].",
    )

    @staticmethod
    def check(text: str, num_placeholders: Count) -> bool:
        return sum(1 for inside in _PLACEHOLDER.findall(text) if inside.strip()) >= num_placeholders

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"num_placeholders": dice.number(dice.scale.blocks)}

    def extra_sentences(self) -> list[str]:
        names = PLACEHOLDERS[: self.arguments["num_placeholders"]]
        return [PLACEHOLDER_SENTENCE.format(placeholder=name) for name in names]


class Postscript(Instruction):
    """A postscript begins with the marker, in any case; `P. S.` is as good as `P.S.`."""

    id = "detectable_content:postscript"
    phrases = (
        'Add a postscript that starts with "{postscript_marker}" at the end.',
        'At the end, write a postscript beginning with "{postscript_marker}".',
        'Close with a note that starts with "{postscript_marker}".',
    )
    is_literal = True
    conflicts = frozenset(("startend:end_checker",))

    @staticmethod
    def check(text: str, postscript_marker: Phrase) -> bool:
        folded, marker = text.lower(), postscript_marker.strip().lower()
        if marker in ("p.s.", "p.p.s", "p.p.s."):
            folded = re.sub(r"(?<=p\.)\s(?=[ps])", "", folded)
        return marker in folded

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"postscript_marker": dice.one(POSTSCRIPT_MARKERS)}

    def dress(self, text: str, draft: Draft) -> str:
        return f"{text}\n{self.arguments['postscript_marker']} {POSTSCRIPT}"
