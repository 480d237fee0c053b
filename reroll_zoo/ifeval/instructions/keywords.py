"""Words and letters that an answer must hold, or must not."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from reroll_zoo.ifeval.instruction import BoundedInstruction, Count, Dice, Draft, Instruction, Phrase, Relation, holds
from reroll_zoo.ifeval.words import COMMON_LETTERS, COMMON_WORDS, FORBIDDEN, KEYWORDS, SCARCE_LETTERS

Words = Annotated[list[Phrase], Field(min_length=1)]
Letter = Annotated[str, Field(min_length=1, max_length=1)]


class KeywordExistence(Instruction):
    """Every keyword occurs, in any case and also inside a longer word. It is taken literally, never as a pattern."""

    id = "keywords:existence"
    phrases = (
        "Use {listed} somewhere in your answer.",
        "Your answer must mention {listed}.",
        "Make sure that {listed} can be found in the text.",
    )

    @staticmethod
    def check(text: str, keywords: Words) -> bool:
        folded = text.lower()
        return all(keyword.lower() in folded for keyword in keywords)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"keywords": dice.some(KEYWORDS[::2])}

    def keywords(self) -> list[str]:
        return list(self.arguments["keywords"])


class KeywordFrequency(BoundedInstruction):
    """The keyword occurs often or seldom enough, in any case and also inside longer words."""

    id = "keywords:frequency"
    phrases = (
        'Use the word "{keyword}" {bound} times.',
        'The word "{keyword}" should appear {bound} times.',
        'I want to read "{keyword}" {bound} times in your answer.',
    )

    @staticmethod
    def check(text: str, keyword: Phrase, frequency: Count, relation: Relation) -> bool:
        return holds(relation, text.lower().count(keyword.strip().lower()), frequency)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        """Many of an unlikely word, or few of a common one."""
        bound = dice.bound("frequency", low=dice.scale.times, high=(2, 4))
        return {"keyword": dice.one(KEYWORDS[1::2] if bound["relation"] == "at least" else COMMON_WORDS), **bound}

    def keywords(self) -> list[str]:
        return [self.arguments["keyword"]] * self.at_least

    def found_in(self, text: str) -> int:
        return text.lower().count(self.arguments["keyword"])


class ForbiddenWords(Instruction):
    """None of the words occurs as a word of its own."""

    id = "keywords:forbidden_words"
    phrases = (
        "Do not use {barred}.",
        "Avoid {barred} completely.",
        "Your answer must not contain {barred}.",
    )

    @staticmethod
    def check(text: str, forbidden_words: Words) -> bool:
        return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"forbidden_words": dice.some(FORBIDDEN)}


class LetterFrequency(BoundedInstruction):
    """A letter (or any character) occurs often or seldom enough, in any case."""

    id = "keywords:letter_frequency"
    phrases = (
        "The letter {letter} should appear {bound} times.",
        "Use the letter {letter} {bound} times.",
        "Your answer must contain the letter {letter} {bound} times.",
    )

    @staticmethod
    def check(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
        return holds(let_relation, text.lower().count(letter.lower()), let_frequency)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        """Many of a common letter, or few of a scarce one."""
        bound = dice.bound("let_frequency", low=dice.scale.letters, high=(3, 6), relation="let_relation")
        return {"letter": dice.one(COMMON_LETTERS if bound["let_relation"] == "at least" else SCARCE_LETTERS), **bound}

    def is_long_enough(self, draft: Draft) -> bool:
        return self.found_in(draft.text) >= self.at_least

    def found_in(self, text: str) -> int:
        return text.lower().count(self.arguments["letter"])
