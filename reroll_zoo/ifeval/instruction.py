"""What an instruction of IFEval is: how it is checked, how a task asks for it, and how a given answer comes to follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from reroll_zoo.ifeval.words import REQUESTS, SENTENCES

T = TypeVar("T")

Relation = Literal["at least", "less than"]
Count = Annotated[int, Field(ge=0)]
Phrase = Annotated[str, Field(min_length=1)]


def holds(relation: Relation, actual: int, bound: int) -> bool:
    """Whether a number keeps to a lower or an upper bound."""
    return actual < bound if relation == "less than" else actual >= bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The ranges that numbers are drawn from, both ends included."""

    min_words: tuple[int, int]
    max_words: tuple[int, int]
    min_sentences: tuple[int, int]
    max_sentences: tuple[int, int]
    blocks: tuple[int, int]
    """Bullets, paragraphs, sections, highlights, placeholders."""
    times: tuple[int, int]
    """Occurrences of a keyword."""
    letters: tuple[int, int]
    capitals: tuple[int, int]
    listed: tuple[int, int]
    """Words in a list of keywords or forbidden words."""


class Dice:
    """Draws arguments of instructions on a scale of difficulty."""

    def __init__(self, random: Random, scale: Scale, *, request: str) -> None:
        self._random = random
        self.scale = scale
        self.request = request
        """What the task asks for, beside its instructions."""

    def number(self, bounds: tuple[int, int]) -> int:
        """Both ends included."""
        return self._random.randint(*bounds)

    def one(self, options: Sequence[T]) -> T:
        """Any of them."""
        return self._random.choice(options)

    def some(self, options: Sequence[T]) -> list[T]:
        """As many different ones as a list has."""
        return self._random.sample(options, k=self.number(self.scale.listed))

    def bound(self, key: str, *, low: tuple[int, int], high: tuple[int, int], relation: str = "relation") -> dict[str, Any]:
        """A lower or an upper bound."""
        word = self.one(("at least", "less than"))
        return {key: self.number(low if word == "at least" else high), relation: word}


@dataclass(slots=True, kw_only=True)
class Draft:
    """An answer in the making: blocks of sentences about a topic, from a supply without end."""

    request: str
    topic: str
    option: str
    """What is said where one of IFEval's three options must be."""
    first_sentence: int
    """Where the supply starts, so that answers differ."""
    sentences: Sequence[str] = SENTENCES
    num_highlights: int = 0
    num_capitals: int = 0
    """What the next sentences still have to carry."""
    blocks: list[list[str]] = field(default_factory=list)
    _num_taken: int = 0

    def next_sentence(self) -> str:
        """One more, with the highlight and the capitals that are asked for."""
        sentence = self.sentences[(self.first_sentence + self._num_taken) % len(self.sentences)].format(topic=self.topic)
        self._num_taken += 1
        words = sentence.removesuffix(".").split()
        num_capitals = min(self.num_capitals, len(words))
        self.num_capitals -= num_capitals
        words[:num_capitals] = [word.upper() for word in words[:num_capitals]]
        if self.num_highlights:
            self.num_highlights -= 1
            words[-1] = f"*{words[-1]}*"
        return " ".join(words) + "."

    @property
    def text(self) -> str:
        """All sentences so far."""
        return " ".join(sentence for block in self.blocks for sentence in block)


class Instruction:
    """One instruction, with its arguments. All that is known of it stands in its class.

    Ids and argument names are those of the published data, misspellings included, so its rows work as they are.
    """

    id: ClassVar[str]
    check: ClassVar[Callable[..., bool]]
    """`(text, **arguments)`: whether a text follows it. Says nothing about empty texts: the verifier never passes one."""
    phrases: ClassVar[tuple[str, ...]]
    """How it is put in plain words."""
    requests: ClassVar[tuple[str, ...]] = REQUESTS
    """What a task that carries it can be about."""
    is_layout: ClassVar[bool] = False
    """It says how the blocks of an answer are set: only one can."""
    changes_case: ClassVar[bool] = False
    is_literal: ClassVar[bool] = False
    """It asks for words as they are written, and so for small letters and capitals of its own."""
    conflicts: ClassVar[frozenset[str]] = frozenset()
    """Others that it contradicts, or that a reader could not tell how to combine."""
    only_with: ClassVar[frozenset[str] | None] = None
    """It governs the whole answer, and only these can stand beside it; None: all but `conflicts`."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments

    @classmethod
    def draw(cls, dice: Dice) -> dict[str, Any]:
        """Arguments for a task."""
        return {}

    def num_blocks(self) -> int:
        """Blocks that an answer must have."""
        return 1

    def keywords(self) -> list[str]:
        """Words that an answer must hold, each as often as it is listed."""
        return []

    def stock(self, draft: Draft) -> None:
        """Say what the sentences of the supply are, or carry."""

    def begin(self, draft: Draft) -> None:
        """Put a sentence in front of the first one of a block."""

    def extra_sentences(self) -> list[str]:
        """At the end of the last block."""
        return []

    def is_long_enough(self, draft: Draft) -> bool:
        """Whether no more sentences are needed."""
        return True

    def lay_out(self, blocks: Sequence[str]) -> str | None:
        """The blocks set as it asks; None: it does not."""
        return None

    def dress(self, text: str, draft: Draft) -> str:
        """The text with what goes before, after or around it."""
        return text

    def found_in(self, text: str) -> int:
        """How many of what it bounds from above a text holds, or a few more: counted simply, never too low."""
        raise NotImplementedError


class BoundedInstruction(Instruction):
    """An instruction with a lower or an upper bound."""

    @classmethod
    def number_key(cls, arguments: Mapping[str, Any]) -> str:
        """Which of its arguments is the number."""
        return next(key for key, value in arguments.items() if isinstance(value, int))

    @property
    def at_least(self) -> int:
        """The lower bound that it sets; 0 where it sets none."""
        return self.arguments[self.number_key(self.arguments)] if "at least" in self.arguments.values() else 0

    def raised(self, answer: str) -> dict[str, Any]:
        """The arguments, with an upper bound that other instructions leave no room for raised until the answer fits."""
        if "less than" not in self.arguments.values():
            return dict(self.arguments)
        key = self.number_key(self.arguments)
        return {**self.arguments, key: max(self.arguments[key], self.found_in(answer) + 1)}
