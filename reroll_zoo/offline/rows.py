"""Rows to learn from: conversations, chosen and rejected answers, or one answer and a verdict. Every one is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reroll.config.data import NamedColumnsConfig, RowSourceConfig
from reroll.data.rows import BadRow
from reroll.data.sources import (
    Columns,
    check_messages,
    check_text,
    convert_rows,
    keys_of,
    read_answer,
    read_messages,
    type_of,
)
from reroll.errors import DataError
from reroll.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt, the first better than the second."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    """Begins and ends with the assistant's words; so does `rejected`."""
    rejected: tuple[Message, ...]
    margin: float = 0.0
    """By how much the chosen one should win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """One answer to a prompt, and whether it is a good one."""

    prompt: tuple[Message, ...]
    answer: tuple[Message, ...]
    is_good: bool


def load_conversations(config: RowSourceConfig) -> list[tuple[Message, ...]]:
    """Conversations to learn from, each ending with the assistant's words.

    A row whose messages end otherwise is completed by its answer column. Errors are those of `reroll.data.sources.load_source`.
    """
    columns = Columns.of(config)

    def to_conversation(index: int, row: Mapping[str, Any]) -> tuple[Message, ...]:
        messages = read_messages(row, columns, system=config.system)
        if messages[-1]["role"] == "assistant":
            return messages
        answer = read_answer(row, columns)
        if answer is None or not answer.strip():
            raise BadRow(f"nothing to learn: no last assistant message and no `{columns.answer}`; {keys_of(row)}")
        return (*messages, Message(role="assistant", content=answer))

    return convert_rows(config, to_conversation)


def load_pairs(config: RowSourceConfig, *, with_margin: bool = False) -> list[Pair]:
    """The pairs of one source, in file order; margins are read where asked for, and 0 where a row has none.

    Raises DataError if the source cannot be read, is empty or has bad rows; it names the first few of them at once.
    """
    table = _table(config, columns="chosen and rejected")

    def to_pair(_: int, row: Mapping[str, Any]) -> Pair:
        prompt = _read_prompt(row, table)
        chosen = _read_answer(row, table.chosen_key, setting="chosen_key")
        rejected = _read_answer(row, table.rejected_key, setting="rejected_key")
        if chosen == rejected:
            raise BadRow(f"`{table.chosen_key}` and `{table.rejected_key}` are equal: neither is better (drop the row)")
        margin = _read_margin(row, table.margin_key) if with_margin else 0.0
        return Pair(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)

    return convert_rows(config, to_pair)


def load_pairs_with_margin(config: RowSourceConfig) -> list[Pair]:
    """As `load_pairs`, with margins."""
    return load_pairs(config, with_margin=True)


def load_judged(config: RowSourceConfig) -> list[JudgedAnswer]:
    """The judged answers of one source, in file order. Errors are those of `load_pairs`."""
    table = _table(config, columns="answers and labels")

    def to_judged(_: int, row: Mapping[str, Any]) -> JudgedAnswer:
        return JudgedAnswer(
            prompt=_read_prompt(row, table),
            answer=_read_answer(row, table.answer_key, setting="answer_key"),
            is_good=_read_label(row, table.label_key),
        )

    return convert_rows(config, to_judged)


def _table(config: RowSourceConfig, *, columns: str) -> NamedColumnsConfig:
    if not isinstance(config, NamedColumnsConfig):
        raise DataError(f"{config.title}: has no {columns} (use a jsonl, parquet or datasets source)")
    return config


def _read_prompt(row: Mapping[str, Any], table: NamedColumnsConfig) -> tuple[Message, ...]:
    columns = replace(Columns.of(table), answer_after=None)
    prompt = read_messages(row, columns, system=table.system)
    if prompt[-1]["role"] == "assistant":
        raise BadRow(f"`{table.messages_key}` ends with an assistant message: it is the prompt (leave the answer out of it)")
    return prompt


def _read_answer(row: Mapping[str, Any], name: str, *, setting: str) -> tuple[Message, ...]:
    value = row.get(name)
    if value is None:
        raise BadRow(f"no `{name}`; {keys_of(row)} (set `{setting}`)")
    if not isinstance(value, list):
        return (Message(role="assistant", content=check_text(value, name=name)),)
    messages = check_messages(value, name=name)
    for place, where in ((0, "begins"), (-1, "ends")):
        if messages[place]["role"] != "assistant":
            raise BadRow(
                f"`{name}` {where} with a message of role {messages[place]['role']}: it continues the prompt, from the "
                "assistant's next message to its last (leave the prompt's own messages out)"
            )
    return messages


def _read_margin(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"`{name}` is {type_of(value)}, not a number")
    if not (math.isfinite(value) and value >= 0):
        raise BadRow(f"`{name}` is {value}: by how much the chosen answer should win is 0 or more")
    return float(value)


def _read_label(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    if value is None:
        raise BadRow(f"no `{name}`; {keys_of(row)} (set `label_key`)")
    if not isinstance(value, int) or value not in (0, 1):
        raise BadRow(f"`{name}` is {value!r}: write true or 1 for a good answer, false or 0 for a bad one")
    return bool(value)
