"""Seeded instruction-following tasks: a request about a topic, one to three instructions, and an answer that follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any, TypeVar

from reroll.config.data_instructions import InstructionsSource
from reroll.data.instruction_gold import bound_key, gold_answer, num_found
from reroll.data.instruction_words import (
    COMMON_LETTERS,
    COMMON_WORDS,
    ENDINGS,
    FORBIDDEN,
    KEYWORDS,
    LANGUAGE_NAMES,
    OPENINGS,
    PHRASES,
    POSTSCRIPT_MARKERS,
    QUESTIONS,
    REQUESTS,
    SCARCE_LETTERS,
    SENTENCES,
    SPLITTERS,
    TOPICS,
)
from reroll.errors import DataError

T = TypeVar("T")

MAX_DRAWS = 500
"""Draws for one task before the source is said to have no more; each fails if the task was there before or does not fit."""
HELD_OUT_EVERY = 5
"""Every fifth topic is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
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


SCALES = {
    "easy": _Scale(
        min_words=(10, 25),
        max_words=(30, 60),
        min_sentences=(2, 3),
        max_sentences=(3, 5),
        blocks=(2, 3),
        times=(2, 3),
        letters=(4, 12),
        capitals=(2, 3),
        listed=(1, 2),
    ),
    "medium": _Scale(
        min_words=(40, 80),
        max_words=(20, 40),
        min_sentences=(4, 7),
        max_sentences=(3, 4),
        blocks=(3, 5),
        times=(3, 5),
        letters=(15, 40),
        capitals=(4, 8),
        listed=(2, 3),
    ),
    "hard": _Scale(
        min_words=(100, 180),
        max_words=(12, 25),
        min_sentences=(8, 14),
        max_sentences=(2, 3),
        blocks=(5, 7),
        times=(5, 8),
        letters=(40, 90),
        capitals=(8, 16),
        listed=(3, 4),
    ),
}

_LAYOUTS = (
    "detectable_format:number_bullet_lists",
    "length_constraints:number_paragraphs",
    "length_constraints:nth_paragraph_first_word",
    "detectable_format:multiple_sections",
    "combination:two_responses",
)
_CASES = ("change_case:english_capital", "change_case:english_lowercase")
_LETTER_FOR_LETTER = (
    "detectable_content:postscript",
    "startend:end_checker",
    "combination:repeat_prompt",
    "detectable_format:constrained_response",
    "detectable_format:multiple_sections",
    "change_case:capital_word_frequency",
)
"""What asks for words as they are written, and so for small letters and capitals of its own."""
_ANYWHERE = ("length_constraints:number_words", "length_constraints:number_sentences", "punctuation:no_comma")
_ONLY_WITH = {
    "detectable_format:json_format": {
        *_ANYWHERE,
        *_CASES,
        "keywords:existence",
        "keywords:frequency",
        "keywords:forbidden_words",
    },
    "language:response_language": {
        *_ANYWHERE,
        "startend:quotation",
        "detectable_format:number_highlighted_sections",
        "detectable_format:number_bullet_lists",
        "length_constraints:number_paragraphs",
        "combination:two_responses",
    },
}
"""Instructions that govern the whole answer, and the few that can stand beside them."""
_CONFLICTS = {
    *(frozenset(pair) for pair in combinations(_LAYOUTS, 2)),
    frozenset(_CASES),
    *(frozenset((case, other)) for case in _CASES for other in _LETTER_FOR_LETTER),
    frozenset(("startend:quotation", "detectable_format:number_bullet_lists")),
    frozenset(("detectable_content:postscript", "startend:end_checker")),
    frozenset(("combination:repeat_prompt", "detectable_format:title")),
    frozenset(("combination:repeat_prompt", "startend:quotation")),
    frozenset(("combination:repeat_prompt", "combination:two_responses")),
    frozenset(("combination:repeat_prompt", "length_constraints:nth_paragraph_first_word")),
    frozenset(("detectable_format:title", "length_constraints:nth_paragraph_first_word")),
}
"""Pairs that contradict each other, or that a reader could not tell how to combine."""


def instruction_rows(source: InstructionsSource) -> Iterator[dict[str, Any]]:
    """The tasks of a source, no two alike. A larger size gives the same tasks and then more.

    A row's `answer` follows all of its instructions, which stand in it as in IFEval's rows. Raises DataError if the source
    asks for more different tasks than there are.
    """
    random = Random(f"instructions/{source.split}/{source.seed}")
    taken: set[str] = set()
    for _ in range(source.size):
        text, task = _new_task(source, random, taken=taken)
        taken.add(text)
        instructions = {"instruction_id_list": list(task.instructions), "kwargs": list(task.instructions.values())}
        yield {"prompt": text, "answer": task.answer, **instructions}


def are_compatible(one: str, other: str) -> bool:
    """Whether one answer can follow both instructions."""
    for name, beside in ((one, other), (other, one)):
        if name in _ONLY_WITH and beside not in _ONLY_WITH[name]:
            return False
    return one != other and frozenset((one, other)) not in _CONFLICTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    request: str
    instructions: dict[str, dict[str, Any]]
    """Arguments by id."""
    answer: str


def _new_task(source: InstructionsSource, random: Random, *, taken: Set[str]) -> tuple[str, _Task]:
    for _ in range(MAX_DRAWS):
        names = _draw_names(source, random)
        if names is None:
            continue
        task = _draw_task(names, source, random)
        text = _in_words(task, random)
        if text not in taken:
            return text, task
    raise DataError(
        f"instruction tasks: only {len(taken)} different ones were found with these families and num_instructions, not"
        f" {source.size} (lower size, add families, or ask for fewer instructions at once)"
    )


def _draw_names(source: InstructionsSource, random: Random) -> list[str] | None:
    """As many compatible instructions as were drawn; None if they do not fit together."""
    num = random.choice(source.num_instructions)
    names: list[str] = []
    for name in random.sample(source.families, k=len(source.families)):
        if len(names) < num and all(are_compatible(name, other) for other in names):
            names.append(name)
    return names if len(names) == num else None


def _draw_task(names: Sequence[str], source: InstructionsSource, random: Random) -> _Task:
    topics = [topic for place, topic in enumerate(TOPICS) if (place % HELD_OUT_EVERY == 0) == (source.split == "held_out")]
    topic = random.choice(topics)
    requests = QUESTIONS if "detectable_format:constrained_response" in names else REQUESTS
    request = random.choice(requests).format(topic=topic)
    dice = _Dice(random, SCALES[source.difficulty])
    instructions = {name: _ARGUMENTS[name](dice) if name in _ARGUMENTS else {} for name in names}
    if "combination:repeat_prompt" in instructions:
        instructions["combination:repeat_prompt"] = {"prompt_to_repeat": request}
    answer = gold_answer(
        instructions,
        request=request,
        topic=topic,
        option=f"My answer is {random.choice(('yes', 'no', 'maybe'))}.",
        first_sentence=random.randrange(len(SENTENCES)),
    )
    raised = {name: _raised(name, kwargs, answer) for name, kwargs in instructions.items()}
    return _Task(request=request, instructions=raised, answer=answer)


def _raised(name: str, kwargs: dict[str, Any], answer: str) -> dict[str, Any]:
    """The arguments, with an upper bound that other instructions leave no room for raised until the answer fits."""
    if "less than" not in kwargs.values():
        return kwargs
    key = bound_key(kwargs)
    return {**kwargs, key: max(kwargs[key], num_found(name, kwargs, answer) + 1)}


class _Dice:
    """Draws arguments of instructions on a scale of difficulty."""

    def __init__(self, random: Random, scale: _Scale) -> None:
        self._random = random
        self.scale = scale

    def number(self, bounds: tuple[int, int]) -> int:
        return self._random.randint(*bounds)

    def one(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def some(self, options: Sequence[T]) -> list[T]:
        return self._random.sample(options, k=self.number(self.scale.listed))

    def bound(self, key: str, *, low: tuple[int, int], high: tuple[int, int], relation: str = "relation") -> dict[str, Any]:
        """A lower or an upper bound."""
        word = self.one(("at least", "less than"))
        return {key: self.number(low if word == "at least" else high), relation: word}

    def keyword(self) -> dict[str, Any]:
        """Many of an unlikely word, or few of a common one."""
        bound = self.bound("frequency", low=self.scale.times, high=(2, 4))
        return {"keyword": self.one(KEYWORDS[1::2] if bound["relation"] == "at least" else COMMON_WORDS), **bound}

    def letter(self) -> dict[str, Any]:
        """Many of a common letter, or few of a scarce one."""
        bound = self.bound("let_frequency", low=self.scale.letters, high=(3, 6), relation="let_relation")
        return {"letter": self.one(COMMON_LETTERS if bound["let_relation"] == "at least" else SCARCE_LETTERS), **bound}

    def first_word(self) -> dict[str, Any]:
        num_paragraphs = self.number(self.scale.blocks)
        nth = self.number((1, num_paragraphs))
        return {"num_paragraphs": num_paragraphs, "nth_paragraph": nth, "first_word": self.one(tuple(OPENINGS))}


_ARGUMENTS: dict[str, Callable[[_Dice], dict[str, Any]]] = {
    "keywords:existence": lambda dice: {"keywords": dice.some(KEYWORDS[::2])},
    "keywords:frequency": _Dice.keyword,
    "keywords:forbidden_words": lambda dice: {"forbidden_words": dice.some(FORBIDDEN)},
    "keywords:letter_frequency": _Dice.letter,
    "language:response_language": lambda dice: {"language": dice.one(tuple(LANGUAGE_NAMES))},
    "length_constraints:number_sentences": lambda dice: dice.bound(
        "num_sentences", low=dice.scale.min_sentences, high=dice.scale.max_sentences
    ),
    "length_constraints:number_paragraphs": lambda dice: {"num_paragraphs": dice.number(dice.scale.blocks)},
    "length_constraints:number_words": lambda dice: dice.bound(
        "num_words", low=dice.scale.min_words, high=dice.scale.max_words
    ),
    "length_constraints:nth_paragraph_first_word": _Dice.first_word,
    "detectable_content:number_placeholders": lambda dice: {"num_placeholders": dice.number(dice.scale.blocks)},
    "detectable_content:postscript": lambda dice: {"postscript_marker": dice.one(POSTSCRIPT_MARKERS)},
    "detectable_format:number_bullet_lists": lambda dice: {"num_bullets": dice.number(dice.scale.blocks)},
    "detectable_format:number_highlighted_sections": lambda dice: {"num_highlights": dice.number(dice.scale.blocks)},
    "detectable_format:multiple_sections": lambda dice: {
        "section_spliter": dice.one(SPLITTERS),
        "num_sections": dice.number(dice.scale.blocks),
    },
    "startend:end_checker": lambda dice: {"end_phrase": dice.one(ENDINGS)},
    "change_case:capital_word_frequency": lambda dice: dice.bound(
        "capital_frequency", low=dice.scale.capitals, high=(2, 4), relation="capital_relation"
    ),
}
"""What draws the arguments of an instruction; the others have none."""


def _in_words(task: _Task, random: Random) -> str:
    """The request and its instructions as one message: in one go, or as a list."""
    rules = [random.choice(PHRASES[name]).format(**_words(kwargs, random)) for name, kwargs in task.instructions.items()]
    if random.random() < 0.5:
        return " ".join([task.request, *rules])
    heading = random.choice(("", "\nRules:", "\nKeep to this:", "\nPlease note:"))
    return "\n".join([task.request + heading, *(f"- {rule}" for rule in rules)])


def _words(kwargs: Mapping[str, Any], random: Random) -> dict[str, Any]:
    """The arguments as phrases name them, numbers and lists put in words."""
    wordings = {"at least": ("at least", "no fewer than"), "less than": ("less than", "fewer than")}
    relation = next((value for value in kwargs.values() if isinstance(value, str) and value in wordings), None)
    bound = f"{random.choice(wordings[relation])} {kwargs[bound_key(kwargs)]}" if relation else ""
    return {
        **kwargs,
        "bound": bound,
        "listed": _enumerated(kwargs.get("keywords", ()), "and"),
        "barred": _enumerated(kwargs.get("forbidden_words", ()), "or"),
        "language_name": LANGUAGE_NAMES.get(kwargs.get("language", "")),
    }


def _enumerated(words: Sequence[str], conjunction: str) -> str:
    """`"a", "b" and "c"`."""
    quoted = [f'"{word}"' for word in words]
    return f" {conjunction} ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))
