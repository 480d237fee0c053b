"""The form of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from reroll_zoo.ifeval.instruction import Count, Dice, Draft, Instruction, Phrase
from reroll_zoo.ifeval.words import QUESTIONS, SPLITTERS, TITLE

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""What a constrained response must hold one of."""
_HIGHLIGHT = re.compile(r"(\*\*?)([^\n*]++)\1")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)


class NumberBulletLists(Instruction):
    """Exactly so many lines that begin with `-` or with a single `*`. An empty bullet is none."""

    id = "detectable_format:number_bullet_lists"
    phrases = (
        "Answer with exactly {num_bullets} bullet points, each on a line that starts with a dash.",
        'Use exactly {num_bullets} bullet points, written like "- my point" and each on its own line.',
        "Make a list of {num_bullets} bullet points. Start each with * or -.",
    )
    is_layout = True
    conflicts = frozenset(("startend:quotation",))

    @staticmethod
    def check(text: str, num_bullets: Count) -> bool:
        return sum(_is_bullet(line.strip()) for line in text.splitlines()) == num_bullets

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"num_bullets": dice.number(dice.scale.blocks)}

    def num_blocks(self) -> int:
        return int(self.arguments["num_bullets"])

    def lay_out(self, blocks: Sequence[str]) -> str | None:
        return "\n".join(f"- {block}" for block in blocks)


def _is_bullet(line: str) -> bool:
    is_marked = line.startswith("-") or (line.startswith("*") and not line.startswith("**"))
    return is_marked and bool(line.strip("-* "))


class ConstrainedResponse(Instruction):
    """One of the three options stands in the text, letter for letter."""

    id = "detectable_format:constrained_response"
    phrases = (
        'Answer with one of these: "My answer is yes.", "My answer is no.", "My answer is maybe."',
        'Your answer must contain "My answer is yes.", "My answer is no." or "My answer is maybe."',
        "Say one of the following, letter for letter: My answer is yes. / My answer is no. / My answer is maybe.",
    )
    requests = QUESTIONS
    is_literal = True

    @staticmethod
    def check(text: str) -> bool:
        return any(option in text for option in OPTIONS)

    def begin(self, draft: Draft) -> None:
        draft.blocks[0].insert(0, draft.option)


class NumberHighlightedSections(Instruction):
    """At least so many stretches in `*…*` or `**…**`, each on one line."""

    id = "detectable_format:number_highlighted_sections"
    phrases = (
        "Highlight at least {num_highlights} parts with asterisks, like *this*.",
        "Put at least {num_highlights} words or phrases between asterisks, as in *important part*.",
        "Mark {num_highlights} or more passages in markdown, *like this one*.",
    )

    @staticmethod
    def check(text: str, num_highlights: Count) -> bool:
        return sum(1 for _, inside in _HIGHLIGHT.findall(text) if inside.strip()) >= num_highlights

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"num_highlights": dice.number(dice.scale.blocks)}

    def stock(self, draft: Draft) -> None:
        draft.num_highlights = self.arguments["num_highlights"]

    def is_long_enough(self, draft: Draft) -> bool:
        return draft.num_highlights == 0


class MultipleSections(Instruction):
    """At least so many sections that begin with the splitter and a number, as in `Section 1`, and have a body."""

    id = "detectable_format:multiple_sections"
    phrases = (
        "Write {num_sections} sections. Start each with {section_spliter} and its number, as in {section_spliter} 1.",
        "Divide the answer into {num_sections} sections that begin with {section_spliter} X, where X is the number.",
        "Use the headings {section_spliter} 1 to {section_spliter} {num_sections} with some text under each.",
    )
    is_layout = True
    is_literal = True

    @staticmethod
    def check(text: str, section_spliter: Phrase, num_sections: Count) -> bool:
        bodies = re.split(rf"{re.escape(section_spliter.strip())}\s?\d+", text)[1:]
        return sum(1 for body in bodies if body.strip()) >= num_sections

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"section_spliter": dice.one(SPLITTERS), "num_sections": dice.number(dice.scale.blocks)}

    def num_blocks(self) -> int:
        return int(self.arguments["num_sections"])

    def lay_out(self, blocks: Sequence[str]) -> str | None:
        splitter = self.arguments["section_spliter"]
        return "\n".join(f"{splitter} {place}\n{block}" for place, block in enumerate(blocks, start=1))


class JsonFormat(Instruction):
    """All of the text is a JSON object or list, perhaps in a code fence. A bare number or string is not a format."""

    id = "detectable_format:json_format"
    phrases = (
        "Give the whole answer as a JSON object.",
        "Your entire output must be valid JSON.",
        "Reply in JSON and with nothing else.",
        'Put the answer into JSON, for example {{"answer": "..."}}.',
    )
    only_with = frozenset(
        (
            "length_constraints:number_words",
            "length_constraints:number_sentences",
            "punctuation:no_comma",
            "change_case:english_capital",
            "change_case:english_lowercase",
            "keywords:existence",
            "keywords:frequency",
            "keywords:forbidden_words",
        )
    )

    @staticmethod
    def check(text: str) -> bool:
        text = text.strip()
        opening = _FENCE.match(text)
        if opening:
            text = text[opening.end() :].removesuffix("```")
        try:
            return isinstance(json.loads(text), dict | list)
        except (ValueError, RecursionError):
            return False

    def dress(self, text: str, draft: Draft) -> str:
        return json.dumps({"answer": text})


class Title(Instruction):
    """A title in double angle brackets stands on one line: `<<a title>>`."""

    id = "detectable_format:title"
    phrases = (
        "Give it a title in double angle brackets, such as <<my title>>.",
        "Your answer must contain a title written like <<title>>.",
        "Add a title and wrap it in << and >>.",
    )
    conflicts = frozenset(("length_constraints:nth_paragraph_first_word",))

    @staticmethod
    def check(text: str) -> bool:
        return any(_holds_title(line) for line in text.splitlines())

    def dress(self, text: str, draft: Draft) -> str:
        return f"<<{TITLE.format(topic=draft.topic)}>>\n{text}"


def _holds_title(line: str) -> bool:
    _, opening, rest = line.partition("<<")
    inside, closing, _ = rest.rpartition(">>")
    return bool(opening and closing and inside.strip("<> "))
