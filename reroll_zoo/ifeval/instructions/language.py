"""The language of an answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from reroll_zoo.ifeval.instruction import Dice, Draft, Instruction
from reroll_zoo.ifeval.language import LANGUAGES, is_in
from reroll_zoo.ifeval.words import FOREIGN_SENTENCES, LANGUAGE_NAMES


def _known(language: str) -> str:
    if language.partition("-")[0].lower() not in LANGUAGES:
        raise ValueError(f"unknown language {language!r} (known are {', '.join(LANGUAGES)})")
    return language


LanguageCode = Annotated[str, AfterValidator(_known)]


class ResponseLanguage(Instruction):
    """The text is in one language more than in any other."""

    id = "language:response_language"
    phrases = (
        "Answer only in {language_name}.",
        "Your whole answer should be in {language_name}.",
        "Write in {language_name} and in no other language.",
        "I only read {language_name}, so use that language.",
    )
    only_with = frozenset(
        (
            "length_constraints:number_words",
            "length_constraints:number_sentences",
            "punctuation:no_comma",
            "startend:quotation",
            "detectable_format:number_highlighted_sections",
            "detectable_format:number_bullet_lists",
            "length_constraints:number_paragraphs",
            "combination:two_responses",
        )
    )

    @staticmethod
    def check(text: str, language: LanguageCode) -> bool:
        return is_in(text, language)

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        return {"language": dice.one(tuple(LANGUAGE_NAMES))}

    def stock(self, draft: Draft) -> None:
        draft.sentences = FOREIGN_SENTENCES[self.arguments["language"]]
