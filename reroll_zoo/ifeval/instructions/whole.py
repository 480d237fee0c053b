"""Instructions about an answer as a whole: said twice, after the request, in quotes, in capitals, without commas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reroll_zoo.ifeval.instruction import BoundedInstruction, Count, Dice, Draft, Instruction, Phrase, Relation, holds
from reroll_zoo.ifeval.language import is_in
from reroll_zoo.ifeval.text import divided, spelled_words
from reroll_zoo.ifeval.words import ENDINGS


class TwoResponses(Instruction):
    """Two different answers with `******` between them."""

    id = "combination:two_responses"
    phrases = (
        "Give two different answers and put ****** between them.",
        "Write two answers that are not the same, separated by six asterisks: ******",
        "I want two different responses with ****** between the first and the second.",
    )
    is_layout = True

    @staticmethod
    def check(text: str) -> bool:
        responses = divided(text, "******")
        return len(responses) == 2 and all(responses) and responses[0] != responses[1]

    def num_blocks(self) -> int:
        return 2

    def lay_out(self, blocks: Sequence[str]) -> str | None:
        return "\n******\n".join(blocks)


class RepeatPrompt(Instruction):
    """The text begins with the request, in any case."""

    id = "combination:repeat_prompt"
    phrases = (
        "Begin by repeating the first sentence of this message word for word, then answer.",
        "First copy the first sentence of this message without any change. Then give your answer.",
        "Before you answer, repeat my first sentence exactly, with nothing in front of it.",
    )
    is_literal = True
    conflicts = frozenset(
        (
            "detectable_format:title",
            "startend:quotation",
            "combination:two_responses",
            "length_constraints:nth_paragraph_first_word",
        )
    )

    @staticmethod
    def check(text: str, prompt_to_repeat: Phrase) -> bool:
        return text.strip().lower().startswith(prompt_to_repeat.strip().lower())

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"prompt_to_repeat": dice.request}

    def dress(self, text: str, draft: Draft) -> str:
        return f"{draft.request}\n{text}"


class EndChecker(Instruction):
    """The text ends with the phrase, in any case; a closing quotation mark may follow."""

    id = "startend:end_checker"
    phrases = (
        'End your answer with exactly these words: "{end_phrase}"',
        'The last words of your answer must be "{end_phrase}"',
        'Finish with "{end_phrase}" and write nothing after it.',
    )
    is_literal = True

    @staticmethod
    def check(text: str, end_phrase: Phrase) -> bool:
        return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"end_phrase": dice.one(ENDINGS)}

    def dress(self, text: str, draft: Draft) -> str:
        return f"{text}\n{self.arguments['end_phrase']}"


class Quotation(Instruction):
    """All of the text stands in double quotation marks."""

    id = "startend:quotation"
    phrases = (
        "Put your whole answer in double quotation marks.",
        "Wrap the entire answer in double quotes.",
        'Your answer should start with " and end with ".',
    )

    @staticmethod
    def check(text: str) -> bool:
        text = text.strip()
        return text.startswith('"') and text.endswith('"') and bool(text.strip('" \n'))

    def dress(self, text: str, draft: Draft) -> str:
        return f'"{text}"'


class CapitalWordFrequency(BoundedInstruction):
    """Words all in capitals, many or few enough; a hyphenated one counts once."""

    id = "change_case:capital_word_frequency"
    phrases = (
        "Write {bound} words in all capital letters.",
        "Words in all capitals should appear {bound} times.",
        "Use {bound} words that are fully in capitals.",
    )
    is_literal = True

    @staticmethod
    def check(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
        return holds(capital_relation, sum(word.isupper() for word in spelled_words(text)), capital_frequency)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return dice.bound("capital_frequency", low=dice.scale.capitals, high=(2, 4), relation="capital_relation")

    def stock(self, draft: Draft) -> None:
        draft.num_capitals = self.at_least

    def is_long_enough(self, draft: Draft) -> bool:
        return draft.num_capitals == 0

    def found_in(self, text: str) -> int:
        return len(re.findall(r"\b[A-Z]+\b", text))


class EnglishCapital(Instruction):
    """English without a small letter. A text in no recognisable language is not English."""

    id = "change_case:english_capital"
    phrases = (
        "Write everything in English and in capital letters.",
        "Use only capital letters, in English.",
        "Your whole answer should be English in all caps.",
    )
    changes_case = True

    @staticmethod
    def check(text: str) -> bool:
        return text.isupper() and is_in(text, "en")

    def dress(self, text: str, draft: Draft) -> str:
        return text.upper()


class EnglishLowercase(Instruction):
    """English without a capital letter."""

    id = "change_case:english_lowercase"
    phrases = (
        "Write everything in English and in lowercase letters.",
        "Use no capital letters at all, and answer in English.",
        "Your whole answer should be English in small letters only.",
    )
    changes_case = True

    @staticmethod
    def check(text: str) -> bool:
        return text.islower() and is_in(text, "en")

    def dress(self, text: str, draft: Draft) -> str:
        return text.lower()


class NoComma(Instruction):
    """No comma anywhere."""

    id = "punctuation:no_comma"
    phrases = (
        "Do not use any commas.",
        "Write without commas.",
        "There must be no comma in your answer.",
        "Leave out all commas.",
    )

    @staticmethod
    def check(text: str) -> bool:
        return "," not in text
