"""IFEval's 25 instructions (Zhou et al. 2023, arXiv 2311.07911), each a class.

Verdicts follow the published checkers, with these differences, all of which make a reward harder to cheat or a verdict
repeatable:

- Keywords are taken literally, never as regular expressions.
- What is counted must hold something: an empty bullet, `[]`, a blank paragraph or a section without a body is none.
- JSON means an object or a list; a bare number or string is not a format.
- Sentences are split and languages told apart by rules of our own (`text.py`, `language.py`), where the published ones ask
  nltk and langdetect. A text in no recognisable language is not English.
"""

from __future__ import annotations

from reroll_zoo.ifeval.instruction import Instruction
from reroll_zoo.ifeval.instructions import content, format, keywords, language, length, whole

_CLASSES: tuple[type[Instruction], ...] = (
    keywords.KeywordExistence,
    keywords.KeywordFrequency,
    keywords.ForbiddenWords,
    keywords.LetterFrequency,
    language.ResponseLanguage,
    length.NumberSentences,
    length.NumberParagraphs,
    length.NumberWords,
    length.NthParagraphFirstWord,
    content.NumberPlaceholders,
    content.Postscript,
    format.NumberBulletLists,
    format.ConstrainedResponse,
    format.NumberHighlightedSections,
    format.MultipleSections,
    format.JsonFormat,
    format.Title,
    whole.TwoResponses,
    whole.RepeatPrompt,
    whole.EndChecker,
    whole.Quotation,
    whole.CapitalWordFrequency,
    whole.EnglishCapital,
    whole.EnglishLowercase,
    whole.NoComma,
)
INSTRUCTIONS: dict[str, type[Instruction]] = {kind.id: kind for kind in _CLASSES}
"""By IFEval's id. Answers are dressed in this order: what is said at the end before what stands around it all."""


def are_compatible(one: str, other: str) -> bool:
    """Whether one answer can follow both instructions."""
    first, second = INSTRUCTIONS[one], INSTRUCTIONS[other]
    if first is second or (first.is_layout and second.is_layout):
        return False
    return not (_excludes(first, second) or _excludes(second, first))


def _excludes(one: type[Instruction], other: type[Instruction]) -> bool:
    if one.only_with is not None and other.id not in one.only_with:
        return True
    return other.id in one.conflicts or (one.changes_case and (other.changes_case or other.is_literal))
