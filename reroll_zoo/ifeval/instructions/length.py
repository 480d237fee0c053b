"""How long an answer is, in sentences, paragraphs or words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from reroll_zoo.ifeval.instruction import BoundedInstruction, Count, Dice, Draft, Instruction, Phrase, Relation, holds
from reroll_zoo.ifeval.text import count_sentences, count_words, divided
from reroll_zoo.ifeval.words import OPENINGS

Place = Annotated[int, Field(ge=1)]


class NumberSentences(BoundedInstruction):
    """Sentences, many or few enough. They are split by rules of our own, where the published checker asks nltk."""

    id = "length_constraints:number_sentences"
    phrases = (
        "Write {bound} sentences.",
        "Your answer should have {bound} sentences.",
        "Make it {bound} sentences.",
    )

    @staticmethod
    def check(text: str, num_sentences: Count, relation: Relation) -> bool:
        return holds(relation, count_sentences(text), num_sentences)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return dice.bound("num_sentences", low=dice.scale.min_sentences, high=dice.scale.max_sentences)

    def is_long_enough(self, draft: Draft) -> bool:
        return sum(map(len, draft.blocks)) >= self.at_least

    def found_in(self, text: str) -> int:
        return len(re.findall(r"[.!?]+|\w\W*$", text))


class NumberParagraphs(Instruction):
    """Exactly so many paragraphs with the divider `***` between them. A blank one is none."""

    id = "length_constraints:number_paragraphs"
    phrases = (
        "Write exactly {num_paragraphs} paragraphs and put *** between them.",
        "Your answer must have {num_paragraphs} paragraphs, separated by a line with ***.",
        "Split the answer into {num_paragraphs} paragraphs with the divider ***.",
    )
    is_layout = True

    @staticmethod
    def check(text: str, num_paragraphs: Count) -> bool:
        paragraphs = divided(text, "***")
        return len(paragraphs) == num_paragraphs and all(paragraphs)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"num_paragraphs": dice.number(dice.scale.blocks)}

    def num_blocks(self) -> int:
        return int(self.arguments["num_paragraphs"])

    def lay_out(self, blocks: Sequence[str]) -> str | None:
        return "\n***\n".join(blocks)


class NumberWords(BoundedInstruction):
    """Words, many or few enough."""

    id = "length_constraints:number_words"
    phrases = (
        "Use {bound} words.",
        "Your answer should be {bound} words long.",
        "Write {bound} words.",
        "The length should be {bound} words.",
    )

    @staticmethod
    def check(text: str, num_words: Count, relation: Relation) -> bool:
        return holds(relation, count_words(text), num_words)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return dice.bound("num_words", low=dice.scale.min_words, high=dice.scale.max_words)

    def is_long_enough(self, draft: Draft) -> bool:
        return self.found_in(draft.text) >= self.at_least

    def found_in(self, text: str) -> int:
        return len(re.findall(r"\w+", text))


class NthParagraphFirstWord(Instruction):
    """Exactly so many paragraphs with blank lines between them, and the n-th (from 1) begins with the word."""

    id = "length_constraints:nth_paragraph_first_word"
    phrases = (
        "Write {num_paragraphs} paragraphs with a blank line between them. Paragraph {nth_paragraph} must start with the word"
        ' "{first_word}".',
        "There should be {num_paragraphs} paragraphs, separated by blank lines. The first word of paragraph {nth_paragraph}"
        ' is "{first_word}".',
        'Begin paragraph {nth_paragraph} of {num_paragraphs} with the word "{first_word}". Put a blank line between them.',
    )
    is_layout = True

    @staticmethod
    def check(text: str, num_paragraphs: Count, nth_paragraph: Place, first_word: Phrase) -> bool:
        paragraphs = [paragraph.split() for paragraph in text.split("\n\n") if paragraph.strip()]
        if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
            return False
        opening = paragraphs[nth_paragraph - 1][0].lstrip("'\"")
        return re.split(r"[.,?!'\"]", opening, maxsplit=1)[0].lower() == first_word.lower()

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        num_paragraphs = dice.number(dice.scale.blocks)
        nth = dice.number((1, num_paragraphs))
        return {"num_paragraphs": num_paragraphs, "nth_paragraph": nth, "first_word": dice.one(tuple(OPENINGS))}

    def num_blocks(self) -> int:
        return int(self.arguments["num_paragraphs"])

    def begin(self, draft: Draft) -> None:
        opening = OPENINGS[self.arguments["first_word"]].format(topic=draft.topic)
        draft.blocks[self.arguments["nth_paragraph"] - 1].insert(0, opening)
