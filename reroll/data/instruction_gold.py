"""Answers built by rule, each following all instructions of its task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import count, cycle
from typing import Any

from reroll.data.instruction_words import (
    FOREIGN_SENTENCES,
    KEYWORD_SENTENCES,
    OPENINGS,
    PLACEHOLDER_SENTENCE,
    PLACEHOLDERS,
    POSTSCRIPT,
    SENTENCES,
    TITLE,
)

Instructions = Mapping[str, Mapping[str, Any]]
"""The arguments of a task's instructions, by id."""


def gold_answer(instructions: Instructions, *, request: str, topic: str, option: str, first_sentence: int) -> str:
    """An answer that follows the instructions, apart from upper bounds: `num_found` says what those must allow.

    `option` is said where one of IFEval's three options must be; `first_sentence` chooses where the supply of sentences
    starts, so that answers differ.
    """
    supply = _Supply(instructions, topic=topic, first_sentence=first_sentence)
    blocks = [[supply.next_sentence()] for _ in range(_num_blocks(instructions))]
    if "detectable_format:constrained_response" in instructions:
        blocks[0].insert(0, option)
    if kwargs := instructions.get("length_constraints:nth_paragraph_first_word"):
        blocks[kwargs["nth_paragraph"] - 1].insert(0, OPENINGS[kwargs["first_word"]].format(topic=topic))
    blocks[-1] += _extra_sentences(instructions)
    for place in cycle(range(len(blocks))):
        if supply.is_enough and _is_long_enough(blocks, instructions):
            break
        blocks[place].append(supply.next_sentence())
    text = _laid_out([" ".join(block) for block in blocks], instructions)
    return _dressed(text, instructions, request=request, topic=topic)


def num_found(name: str, kwargs: Mapping[str, Any], text: str) -> int:
    """How many of what an instruction bounds from above a text holds, or a few more: counted simply, never too low."""
    if name == "keywords:frequency":
        return text.lower().count(kwargs["keyword"])
    if name == "keywords:letter_frequency":
        return text.lower().count(kwargs["letter"])
    patterns = {
        "length_constraints:number_words": r"\w+",
        "length_constraints:number_sentences": r"[.!?]+|\w\W*$",
        "change_case:capital_word_frequency": r"\b[A-Z]+\b",
    }
    return len(re.findall(patterns[name], text))


def bound_key(kwargs: Mapping[str, Any]) -> str:
    """Which argument of an instruction is its number."""
    return next(key for key, value in kwargs.items() if isinstance(value, int))


class _Supply:
    """Sentences about a topic, without end. The first ones carry the highlights and the capitals that are asked for."""

    def __init__(self, instructions: Instructions, *, topic: str, first_sentence: int) -> None:
        language = instructions.get("language:response_language")
        self._sentences = FOREIGN_SENTENCES[language["language"]] if language else SENTENCES
        self._places = count(first_sentence)
        self._topic = topic
        self._num_highlights = instructions.get("detectable_format:number_highlighted_sections", {}).get("num_highlights", 0)
        self._num_capitals = _at_least(instructions, "change_case:capital_word_frequency")

    @property
    def is_enough(self) -> bool:
        return self._num_highlights == 0 and self._num_capitals == 0

    def next_sentence(self) -> str:
        sentence = self._sentences[next(self._places) % len(self._sentences)].format(topic=self._topic)
        words = sentence.removesuffix(".").split()
        num_capitals = min(self._num_capitals, len(words))
        self._num_capitals -= num_capitals
        words[:num_capitals] = [word.upper() for word in words[:num_capitals]]
        if self._num_highlights:
            self._num_highlights -= 1
            words[-1] = f"*{words[-1]}*"
        return " ".join(words) + "."


def _at_least(instructions: Instructions, name: str) -> int:
    """The lower bound that an instruction sets; 0 where it sets none."""
    kwargs = instructions.get(name, {})
    return kwargs[bound_key(kwargs)] if "at least" in kwargs.values() else 0


def _num_blocks(instructions: Instructions) -> int:
    sizes = {
        "detectable_format:number_bullet_lists": "num_bullets",
        "length_constraints:number_paragraphs": "num_paragraphs",
        "length_constraints:nth_paragraph_first_word": "num_paragraphs",
        "detectable_format:multiple_sections": "num_sections",
    }
    if "combination:two_responses" in instructions:
        return 2
    return max([instructions[name][size] for name, size in sizes.items() if name in instructions], default=1)


def _extra_sentences(instructions: Instructions) -> list[str]:
    """Sentences with the keywords and placeholders that are asked for."""
    keywords = list(instructions.get("keywords:existence", {}).get("keywords", []))
    if num_times := _at_least(instructions, "keywords:frequency"):
        keywords += [instructions["keywords:frequency"]["keyword"]] * num_times
    sentences = [
        template.format(keyword=keyword) for keyword, template in zip(keywords, cycle(KEYWORD_SENTENCES), strict=False)
    ]
    num_placeholders = instructions.get("detectable_content:number_placeholders", {}).get("num_placeholders", 0)
    return sentences + [PLACEHOLDER_SENTENCE.format(placeholder=name) for name in PLACEHOLDERS[:num_placeholders]]


def _is_long_enough(blocks: list[list[str]], instructions: Instructions) -> bool:
    text = " ".join(sentence for block in blocks for sentence in block)
    num_letters = text.lower().count(instructions.get("keywords:letter_frequency", {}).get("letter", " "))
    return (
        len(re.findall(r"\w+", text)) >= _at_least(instructions, "length_constraints:number_words")
        and sum(map(len, blocks)) >= _at_least(instructions, "length_constraints:number_sentences")
        and num_letters >= _at_least(instructions, "keywords:letter_frequency")
    )


def _laid_out(blocks: list[str], instructions: Instructions) -> str:
    """The blocks, set as the one instruction about layout asks."""
    if "detectable_format:number_bullet_lists" in instructions:
        return "\n".join(f"- {block}" for block in blocks)
    if kwargs := instructions.get("detectable_format:multiple_sections"):
        return "\n".join(f"{kwargs['section_spliter']} {place}\n{block}" for place, block in enumerate(blocks, start=1))
    dividers = {"length_constraints:number_paragraphs": "\n***\n", "combination:two_responses": "\n******\n"}
    return next((divider for name, divider in dividers.items() if name in instructions), "\n\n").join(blocks)


def _dressed(text: str, instructions: Instructions, *, request: str, topic: str) -> str:
    """The text with what goes before, after and around it."""
    if "detectable_format:title" in instructions:
        text = f"<<{TITLE.format(topic=topic)}>>\n{text}"
    if "combination:repeat_prompt" in instructions:
        text = f"{request}\n{text}"
    if kwargs := instructions.get("detectable_content:postscript"):
        text = f"{text}\n{kwargs['postscript_marker']} {POSTSCRIPT}"
    if kwargs := instructions.get("startend:end_checker"):
        text = f"{text}\n{kwargs['end_phrase']}"
    if "detectable_format:json_format" in instructions:
        text = json.dumps({"answer": text})
    if "startend:quotation" in instructions:
        text = f'"{text}"'
    if "change_case:english_capital" in instructions:
        return text.upper()
    return text.lower() if "change_case:english_lowercase" in instructions else text
