"""IFEval's 25 instructions (Zhou et al. 2023, arXiv 2311.07911), each as a function `(text, **kwargs) -> bool`.

Ids and argument names are those of the published data, misspellings included, so its rows work as they are. Verdicts follow
the published checkers, with these differences, all of which make a reward harder to cheat or a verdict repeatable:

- Keywords are taken literally, never as regular expressions.
- What is counted must hold something: an empty bullet, `[]`, a blank paragraph or a section without a body is none.
- JSON means an object or a list; a bare number or string is not a format.
- Sentences are split and languages told apart by rules of our own (`text.py`, `language.py`), where the published ones ask
  nltk and langdetect. A text in no recognisable language is not English.

The functions say nothing about empty texts, several of which would pass (no commas there): the verifier never passes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from reroll.rewards.instructions.language import LANGUAGES, is_in
from reroll.rewards.instructions.text import count_sentences, count_words, divided, spelled_words

Relation = Literal["at least", "less than"]
Count = Annotated[int, Field(ge=0)]
Place = Annotated[int, Field(ge=1)]
Phrase = Annotated[str, Field(min_length=1)]
Words = Annotated[list[Phrase], Field(min_length=1)]
Letter = Annotated[str, Field(min_length=1, max_length=1)]


def _known(language: str) -> str:
    if language.partition("-")[0].lower() not in LANGUAGES:
        raise ValueError(f"unknown language {language!r} (known are {', '.join(LANGUAGES)})")
    return language


LanguageCode = Annotated[str, AfterValidator(_known)]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""What a constrained response must hold one of."""

_HIGHLIGHT = re.compile(r"(\*\*?)([^\n*]++)\1")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]*+)\]")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)


def _holds(relation: Relation, actual: int, bound: int) -> bool:
    return actual < bound if relation == "less than" else actual >= bound


def keyword_existence(text: str, keywords: Words) -> bool:
    """Every keyword occurs, in any case and also inside a longer word."""
    folded = text.lower()
    return all(keyword.lower() in folded for keyword in keywords)


def keyword_frequency(text: str, keyword: Phrase, frequency: Count, relation: Relation) -> bool:
    """The keyword occurs often or seldom enough, in any case and also inside longer words."""
    return _holds(relation, text.lower().count(keyword.strip().lower()), frequency)


def forbidden_words(text: str, forbidden_words: Words) -> bool:
    """None of the words occurs as a word of its own."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """A letter (or any character) occurs often or seldom enough, in any case."""
    return _holds(let_relation, text.lower().count(letter.lower()), let_frequency)


def response_language(text: str, language: LanguageCode) -> bool:
    """The text is in one language more than in any other."""
    return is_in(text, language)


def number_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    """Sentences, many or few enough."""
    return _holds(relation, count_sentences(text), num_sentences)


def number_words(text: str, num_words: Count, relation: Relation) -> bool:
    """Words, many or few enough."""
    return _holds(relation, count_words(text), num_words)


def number_paragraphs(text: str, num_paragraphs: Count) -> bool:
    """Exactly so many paragraphs with the divider `***` between them."""
    paragraphs = divided(text, "***")
    return len(paragraphs) == num_paragraphs and all(paragraphs)


def nth_paragraph_first_word(text: str, num_paragraphs: Count, nth_paragraph: Place, first_word: Phrase) -> bool:
    """Exactly so many paragraphs with blank lines between them, and the n-th (from 1) begins with the word."""
    paragraphs = [paragraph.split() for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    opening = paragraphs[nth_paragraph - 1][0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", opening, maxsplit=1)[0].lower() == first_word.lower()


def postscript(text: str, postscript_marker: Phrase) -> bool:
    """A postscript begins with the marker, in any case; `P. S.` is as good as `P.S.`."""
    folded, marker = text.lower(), postscript_marker.strip().lower()
    if marker in ("p.s.", "p.p.s", "p.p.s."):
        folded = re.sub(r"(?<=p\.)\s(?=[ps])", "", folded)
    return marker in folded


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    """At least so many placeholders such as `[address]`."""
    return sum(1 for inside in _PLACEHOLDER.findall(text) if inside.strip()) >= num_placeholders


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    """Exactly so many lines that begin with `-` or with a single `*`."""
    return sum(_is_bullet(line.strip()) for line in text.splitlines()) == num_bullets


def _is_bullet(line: str) -> bool:
    is_marked = line.startswith("-") or (line.startswith("*") and not line.startswith("**"))
    return is_marked and bool(line.strip("-* "))


def constrained_response(text: str) -> bool:
    """One of the three options stands in the text, letter for letter."""
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    """At least so many stretches in `*…*` or `**…**`, each on one line."""
    return sum(1 for _, inside in _HIGHLIGHT.findall(text) if inside.strip()) >= num_highlights


def multiple_sections(text: str, section_spliter: Phrase, num_sections: Count) -> bool:
    """At least so many sections that begin with the splitter and a number, as in `Section 1`."""
    bodies = re.split(rf"{re.escape(section_spliter.strip())}\s?\d+", text)[1:]
    return sum(1 for body in bodies if body.strip()) >= num_sections


def json_format(text: str) -> bool:
    """All of the text is a JSON object or list, perhaps in a code fence."""
    text = text.strip()
    opening = _FENCE.match(text)
    if opening:
        text = text[opening.end() :].removesuffix("```")
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def title(text: str) -> bool:
    """A title in double angle brackets stands on one line: `<<a title>>`."""
    return any(_holds_title(line) for line in text.splitlines())


def _holds_title(line: str) -> bool:
    _, opening, rest = line.partition("<<")
    inside, closing, _ = rest.rpartition(">>")
    return bool(opening and closing and inside.strip("<> "))


def two_responses(text: str) -> bool:
    """Two different answers with `******` between them."""
    responses = divided(text, "******")
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: Phrase) -> bool:
    """The text begins with the request, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: Phrase) -> bool:
    """The text ends with the phrase, in any case; a closing quotation mark may follow."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """All of the text stands in double quotation marks."""
    text = text.strip()
    return text.startswith('"') and text.endswith('"') and bool(text.strip('" \n'))


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Words all in capitals, many or few enough; a hyphenated one counts once."""
    return _holds(capital_relation, sum(word.isupper() for word in spelled_words(text)), capital_frequency)


def english_capital(text: str) -> bool:
    """English without a small letter."""
    return text.isupper() and is_in(text, "en")


def english_lowercase(text: str) -> bool:
    """English without a capital letter."""
    return text.islower() and is_in(text, "en")


def no_comma(text: str) -> bool:
    """No comma anywhere."""
    return "," not in text


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keyword_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""By IFEval's id."""
