"""Seeded instruction-following tasks: a request about a topic, one to three instructions, and an answer that follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Any

from reroll.errors import DataError
from reroll_zoo.ifeval.config import InstructionTasksConfig
from reroll_zoo.ifeval.gold import gold_answer
from reroll_zoo.ifeval.instruction import BoundedInstruction, Dice, Draft, Instruction, Scale
from reroll_zoo.ifeval.instructions import INSTRUCTIONS, are_compatible
from reroll_zoo.ifeval.words import LANGUAGE_NAMES, REQUESTS, SENTENCES, TOPICS

MAX_DRAWS = 500
"""Draws for one task before the source is said to have no more; each fails if the task was there before or does not fit."""
HELD_OUT_EVERY = 5
"""Every fifth topic is held out."""


SCALES = {
    "easy": Scale(
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
    "medium": Scale(
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
    "hard": Scale(
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


def instruction_rows(source: InstructionTasksConfig) -> Iterator[dict[str, Any]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _InstructionTask:
    request: str
    instructions: dict[str, dict[str, Any]]
    """Arguments by id."""
    answer: str


def _new_task(source: InstructionTasksConfig, random: Random, *, taken: Set[str]) -> tuple[str, _InstructionTask]:
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


def _draw_names(source: InstructionTasksConfig, random: Random) -> list[str] | None:
    """As many compatible instructions as were drawn; None if they do not fit together."""
    num = random.choice(source.num_instructions)
    names: list[str] = []
    for name in random.sample(source.families, k=len(source.families)):
        if len(names) < num and all(are_compatible(name, other) for other in names):
            names.append(name)
    return names if len(names) == num else None


def _draw_task(names: Sequence[str], source: InstructionTasksConfig, random: Random) -> _InstructionTask:
    topics = [topic for place, topic in enumerate(TOPICS) if (place % HELD_OUT_EVERY == 0) == (source.split == "held_out")]
    topic = random.choice(topics)
    requests = next((kind.requests for name in names if (kind := INSTRUCTIONS[name]).requests is not REQUESTS), REQUESTS)
    request = random.choice(requests).format(topic=topic)
    dice = Dice(random, SCALES[source.difficulty], request=request)
    drawn = {name: INSTRUCTIONS[name](INSTRUCTIONS[name].draw(dice)) for name in names}
    draft = Draft(
        request=request,
        topic=topic,
        option=f"My answer is {random.choice(('yes', 'no', 'maybe'))}.",
        first_sentence=random.randrange(len(SENTENCES)),
    )
    answer = gold_answer([drawn[name] for name in INSTRUCTIONS if name in drawn], draft)
    return _InstructionTask(
        request=request, instructions={name: _fitted(each, answer) for name, each in drawn.items()}, answer=answer
    )


def _fitted(instruction: Instruction, answer: str) -> dict[str, Any]:
    return instruction.raised(answer) if isinstance(instruction, BoundedInstruction) else dict(instruction.arguments)


def _in_words(task: _InstructionTask, random: Random) -> str:
    """The request and its instructions as one message: in one go, or as a list."""
    rules = [
        random.choice(INSTRUCTIONS[name].phrases).format(**_words(kwargs, random)) for name, kwargs in task.instructions.items()
    ]
    if random.random() < 0.5:
        return " ".join([task.request, *rules])
    heading = random.choice(("", "\nRules:", "\nKeep to this:", "\nPlease note:"))
    return "\n".join([task.request + heading, *(f"- {rule}" for rule in rules)])


def _words(kwargs: Mapping[str, Any], random: Random) -> dict[str, Any]:
    """The arguments as phrases name them, numbers and lists put in words."""
    wordings = {"at least": ("at least", "no fewer than"), "less than": ("less than", "fewer than")}
    relation = next((value for value in kwargs.values() if isinstance(value, str) and value in wordings), None)
    bound = f"{random.choice(wordings[relation])} {kwargs[BoundedInstruction.number_key(kwargs)]}" if relation else ""
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
