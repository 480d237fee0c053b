"""Answers built by rule, each following all instructions of its task."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from reroll_zoo.ifeval.instruction import Draft, Instruction
from reroll_zoo.ifeval.words import KEYWORD_SENTENCES


def gold_answer(instructions: Sequence[Instruction], draft: Draft) -> str:
    """An answer that follows the instructions, in the order of `INSTRUCTIONS`, apart from upper bounds (`found_in`)."""
    for instruction in instructions:
        instruction.stock(draft)
    num_blocks = max([instruction.num_blocks() for instruction in instructions], default=1)
    draft.blocks = [[draft.next_sentence()] for _ in range(num_blocks)]
    for instruction in reversed(instructions):  # The word that a paragraph begins with is put in front of an option.
        instruction.begin(draft)
    draft.blocks[-1] += _extra_sentences(instructions)
    for place in cycle(range(num_blocks)):
        if all(instruction.is_long_enough(draft) for instruction in instructions):
            break
        draft.blocks[place].append(draft.next_sentence())
    return _dressed([" ".join(block) for block in draft.blocks], instructions, draft)


def _extra_sentences(instructions: Sequence[Instruction]) -> list[str]:
    """Sentences with the keywords and placeholders that are asked for."""
    keywords = [keyword for instruction in instructions for keyword in instruction.keywords()]
    sentences = [
        template.format(keyword=keyword) for keyword, template in zip(keywords, cycle(KEYWORD_SENTENCES), strict=False)
    ]
    return sentences + [sentence for instruction in instructions for sentence in instruction.extra_sentences()]


def _dressed(blocks: Sequence[str], instructions: Sequence[Instruction], draft: Draft) -> str:
    """The blocks, set as the one instruction about layout asks, with what goes before, after and around them."""
    laid_out = (instruction.lay_out(blocks) for instruction in instructions)
    text = next((text for text in laid_out if text is not None), "\n\n".join(blocks))
    for instruction in instructions:
        text = instruction.dress(text, draft)
    return text
