"""From config to prompts. Every row is checked here, so nothing malformed reaches a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from reroll.config.data import DataConfig, EnvSourceConfig, NamedColumnsConfig, RowSourceConfig, SourceConfig, TableConfig
from reroll.config.registry import load_entry
from reroll.data.prompts import PromptSampler, PromptSource
from reroll.data.rows import BadRow, read_rows
from reroll.errors import DataError
from reroll.types import Message, Prompt

T = TypeVar("T")

SourceRows = Mapping[str, Sequence[Any]]
"""What has been read of a config's sources, by their paths in it (`data.train.0`)."""

MAX_PROBLEMS = 5
"""Bad rows reported at once: enough to see a pattern, few enough to read."""
IMAGE_COLUMNS = ("images", "image")
ROLES = ("system", "developer", "user", "assistant", "tool")


def load_train(data: DataConfig, *, seed: int, rows: SourceRows) -> PromptSampler:
    """The endless mix of all training sources. Those that `rows` has are not read again; so it is in `load_eval`."""
    sources = [
        PromptSource(prompts=prompts, domain=config.domain, weight=config.weight, level=config.level)
        for config, prompts in zip(data.train, _load_all("train", data.train, rows, prefix=""), strict=True)
    ]
    return PromptSampler(sources, seed=seed, shuffle=data.shuffle, curriculum=data.curriculum)


def load_eval(data: DataConfig, *, rows: SourceRows) -> list[Prompt]:
    """All held-out prompts, source after source. Their ids begin with `eval/`, so they never clash with training ids."""
    return [prompt for prompts in _load_all("eval", data.eval, rows, prefix="eval/") for prompt in prompts]


def load_source(config: SourceConfig) -> list[Prompt]:
    """The prompts of one source, with ids `domain/N` in file order.

    A row's own system message (column `system`, or the first of its messages) stands in place of the source's. Raises
    DataError if the source cannot be read, is empty or has bad rows; the message names the first few bad rows at once.
    """
    if isinstance(config, EnvSourceConfig):
        return _instances(config)
    if not isinstance(config, RowSourceConfig):
        raise TypeError(f"{type(config).__name__} gives no rows: derive it from RowSourceConfig")
    columns = Columns.of(config)

    def to_prompt(index: int, row: Mapping[str, Any]) -> Prompt:
        messages = read_messages(row, columns, system=config.system)
        if messages[-1]["role"] == "assistant":
            raise BadRow("ends with an assistant message: nothing is left to answer (drop it, or train with `pipeline: sft`)")
        return Prompt(
            id=_id(config.domain, index),
            messages=messages,
            domain=config.domain,
            answer=read_answer(row, columns),
            extra={name: value for name, value in row.items() if name not in columns.used},
        )

    return convert_rows(config, to_prompt)


def _instances(config: EnvSourceConfig) -> list[Prompt]:
    """The environment says what the policy is shown: a prompt carries only the seed."""
    seeds = range(config.first_seed, config.first_seed + min(config.num, config.limit or config.num))
    return [
        Prompt(id=_id(config.domain, index), messages=(), domain=config.domain, extra={"seed": seed})
        for index, seed in enumerate(seeds)
    ]


def _id(domain: str, index: int, *, prefix: str = "") -> str:
    return f"{prefix}{domain}/{index}"


def _load_all(part: str, configs: Sequence[SourceConfig], rows: SourceRows, *, prefix: str) -> list[Sequence[Prompt]]:
    """The prompts of each source. Sources of one domain count on from each other, so that ids stay unique."""
    num_in_domain: dict[str, int] = {}
    sources: list[Sequence[Prompt]] = []
    for place, config in enumerate(configs):
        first = num_in_domain.get(config.domain, 0)
        where = f"data.{part}.{place}"
        prompts: Sequence[Prompt] = rows[where] if where in rows else load_source(config)
        if prefix or first:
            named = enumerate(prompts, start=first)
            prompts = [replace(prompt, id=_id(config.domain, index, prefix=prefix)) for index, prompt in named]
        sources.append(prompts)
        num_in_domain[config.domain] = first + len(prompts)
    return sources


def convert_rows(config: RowSourceConfig, convert: Callable[[int, Mapping[str, Any]], T]) -> list[T]:
    """`convert(index, row)` of every row. Raises DataError that names the first few rows for which it raises BadRow."""
    items: list[T] = []
    problems: list[str] = []
    for index, (place, row) in enumerate(islice(read_rows(config), config.limit)):
        try:
            if isinstance(row, BadRow):
                raise row
            items.append(convert(index, row))
        except BadRow as problem:
            problems.append(f"  {place}: {problem}")
            if len(problems) == MAX_PROBLEMS:
                problems.append(f"  (stopped after {MAX_PROBLEMS} bad rows)")
                break
    if problems:
        raise DataError("\n".join([f"{config.title}: bad rows", *problems]))
    if not items:
        raise DataError(f"{config.title}: is empty (it must hold at least one row)")
    return items


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns that make a prompt are called."""

    prompt: str = "prompt"
    messages: str = "messages"
    answer: str = "answer"
    system: str = "system"
    answer_after: str | None = None
    """The answer stands after the last of these marks, if any are set."""
    folder: Path | None = None
    """Where the files that rows name are looked for."""

    @classmethod
    def of(cls, config: RowSourceConfig) -> Columns:
        """The source's own names; generated rows have the default ones."""
        if not isinstance(config, NamedColumnsConfig):
            return cls()
        return cls(
            prompt=config.prompt_key,
            messages=config.messages_key,
            answer=config.answer_key,
            answer_after=config.answer_after,
            folder=config.path.parent if isinstance(config, TableConfig) else None,
        )

    @property
    def used(self) -> tuple[str, ...]:
        """All of them."""
        return (self.prompt, self.messages, self.answer, self.system, *IMAGE_COLUMNS)


def read_messages(row: Mapping[str, Any], columns: Columns, *, system: str | None) -> tuple[Message, ...]:
    """The row's messages, or its prompt as one user message, with a system message in front if there is one to put."""
    if _may_have_pictures(row, columns) and (with_pictures := load_entry("reroll.vision", "rows")):
        row = with_pictures(row, prompt=columns.prompt, messages=columns.messages, folder=columns.folder)
    if row.get(columns.messages) is not None:
        messages = check_messages(row[columns.messages], name=columns.messages)
    elif row.get(columns.prompt) is not None:
        content = row[columns.prompt]
        if isinstance(content, list):
            raise BadRow(f"`{columns.prompt}` is a list (for chat messages set `messages_key: {columns.prompt}`)")
        messages = (Message(role="user", content=check_text(content, name=columns.prompt)),)
    else:
        raise BadRow(f"no `{columns.prompt}` and no `{columns.messages}`; {keys_of(row)} (set `prompt_key` or `messages_key`)")

    if row.get(columns.system) is not None:
        system = check_text(row[columns.system], name=columns.system, may_be_blank=True)
    if system and system.strip() and messages[0]["role"] != "system":
        messages = (Message(role="system", content=system), *messages)
    if messages[-1]["role"] in ("system", "developer"):
        raise BadRow(f"`{columns.messages}` holds only a system message (add a user message)")
    return messages


def _may_have_pictures(row: Mapping[str, Any], columns: Columns) -> bool:
    messages = [message for message in row.get(columns.messages) or () if isinstance(message, dict)]
    has_parts = any(isinstance(message.get("content"), list) or message.get("images") for message in messages)
    return has_parts or any(row.get(name) is not None for name in IMAGE_COLUMNS)


def check_messages(value: object, *, name: str) -> tuple[Message, ...]:
    """Chat messages as a column `name` holds them. Raises BadRow."""
    if not isinstance(value, list):
        raise BadRow(f"`{name}` is {type_of(value)}, not a list of {{role, content}}")
    if not value:
        raise BadRow(f"`{name}` is empty")
    return tuple(_check_message(message, name=f"{name}[{place}]") for place, message in enumerate(value))


def _check_message(value: object, *, name: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"`{name}` is {type_of(value)}, not {{role, content}}")
    missing = [key for key in ("role", "content") if value.get(key) is None]
    if missing:
        raise BadRow(f"`{name}` has no `{missing[0]}`; {keys_of(value)}")
    # Columnar files fill the keys that only other messages have with nulls: those carry nothing and may go.
    known = ("role", "content", "images")
    unknown = [str(key) for key, content in value.items() if key not in known and content is not None]
    if unknown:
        raise BadRow(f"`{name}` has keys that would be lost: {', '.join(unknown)} (keep only role and content)")
    if value["role"] not in ROLES:
        raise BadRow(f"`{name}.role` is {value['role']!r}, not one of {', '.join(ROLES)}")
    may_be_blank = value["role"] in ("system", "tool")
    content = check_text(value["content"], name=f"{name}.content", may_be_blank=may_be_blank)
    message = Message(role=value["role"], content=content)
    return Message(**message, images=value["images"]) if value.get("images") else message


def check_text(value: object, *, name: str, may_be_blank: bool = False) -> str:
    """Text as a column `name` holds it. Raises BadRow."""
    if not isinstance(value, str):
        raise BadRow(f"`{name}` is {type_of(value)}, not a string")
    if not value.strip() and not may_be_blank:
        raise BadRow(f"`{name}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"`{name}` holds half a character (a lone surrogate) at position {error.start}") from error
    return value


def read_answer(row: Mapping[str, Any], columns: Columns) -> str | None:
    """The row's reference answer, if it has one. Raises BadRow."""
    value = row.get(columns.answer)
    if value is None:
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise BadRow(f"`{columns.answer}` is {value}")
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"`{columns.answer}` is {type_of(value)}, not a string or a number (a reward can read other columns)")
    text = check_text(value, name=columns.answer, may_be_blank=True)
    if columns.answer_after is None:
        return text
    _, mark, answer = text.rpartition(columns.answer_after)
    if not mark:
        raise BadRow(f"`{columns.answer}` has no {columns.answer_after!r} (change or remove `answer_after`)")
    return answer.strip()


def keys_of(row: Mapping[Any, Any]) -> str:
    """Which columns there are, for a message about one that is missing."""
    return f"it has: {', '.join(map(str, row))}" if row else "it has no keys"


def type_of(value: object) -> str:
    """What a value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
