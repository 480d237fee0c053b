"""Rows of compared and judged answers: what is read, and what a bad row is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.data import JsonlSourceConfig
from reroll.errors import DataError
from reroll.types import Message
from reroll_zoo.offline.rows import load_conversations, load_judged, load_pairs
from reroll_zoo.reasoning_gym.config import ReasoningGymSourceConfig

GOOD_PAIR = {"prompt": "hi", "chosen": "yes", "rejected": "no"}


def source(folder: Path, *rows: object, **options: Any) -> JsonlSourceConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlSourceConfig(path=path, **options)


def said(content: str, role: str = "assistant") -> Message:
    return Message(role=role, content=content)


def test_text_columns_become_a_user_message_and_two_answers(tmp_path: Path) -> None:
    (pair,) = load_pairs(source(tmp_path, GOOD_PAIR | {"margin": "not read"}))
    assert pair.prompt == (said("hi", "user"),)
    assert (pair.chosen, pair.rejected) == ((said("yes"),), (said("no"),))
    assert pair.margin == 0


def test_answers_may_be_messages_that_continue_a_conversation(tmp_path: Path) -> None:
    history = [said("hi", "user"), said("hello"), said("and now?", "user")]
    better = [said("look"), said("where?", "user"), said("there")]
    (pair,) = load_pairs(source(tmp_path, {"messages": history, "chosen": better, "rejected": [said("no")]}, system="be kind"))
    assert pair.prompt == (said("be kind", "system"), *history)
    assert pair.chosen == tuple(better)
    assert pair.rejected == (said("no"),)


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    row = {"q": "hi", "win": "yes", "lose": "no", "gap": 2}
    keys = {"prompt_key": "q", "chosen_key": "win", "rejected_key": "lose", "margin_key": "gap"}
    (pair,) = load_pairs(source(tmp_path, row, **keys), with_margin=True)
    assert (pair.chosen[0]["content"], pair.rejected[0]["content"], pair.margin) == ("yes", "no", 2.0)
    keys = {"prompt_key": "q", "answer_key": "win", "label_key": "ok"}
    (judged,) = load_judged(source(tmp_path, row | {"ok": True}, **keys))
    assert (judged.answer, judged.is_good) == ((said("yes"),), True)


def test_a_row_without_a_margin_asks_for_none(tmp_path: Path) -> None:
    pairs = load_pairs(source(tmp_path, GOOD_PAIR, GOOD_PAIR | {"margin": 0.5}), with_margin=True)
    assert [pair.margin for pair in pairs] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, "no `prompt` and no `messages`"),
        ({"prompt": "hi", "rejected": "no"}, "no `chosen`; it has: prompt, rejected (set `chosen_key`)"),
        ({"prompt": "hi", "chosen": "yes"}, "no `rejected`; it has: prompt, chosen (set `rejected_key`)"),
        (GOOD_PAIR | {"chosen": 3}, "`chosen` is a number, not a string"),
        (GOOD_PAIR | {"rejected": " "}, "`rejected` is empty"),
        (GOOD_PAIR | {"rejected": "yes"}, "`chosen` and `rejected` are equal"),
        (GOOD_PAIR | {"chosen": [said("hi", "user"), said("yes")]}, "`chosen` begins with a message of role user"),
        (GOOD_PAIR | {"chosen": [said("yes"), said("really?", "user")]}, "`chosen` ends with a message of role user"),
        (GOOD_PAIR | {"chosen": [{"role": "assistant"}]}, "`chosen[0]` has no `content`"),
        (GOOD_PAIR | {"messages": [said("hi", "user"), said("yes")]}, "`messages` ends with an assistant message"),
        (GOOD_PAIR | {"margin": True}, "`margin` is a boolean, not a number"),
        (GOOD_PAIR | {"margin": -1}, "`margin` is -1: by how much the chosen answer should win is 0 or more"),
        (GOOD_PAIR | {"margin": float("inf")}, "`margin` is inf"),
    ],
)
def test_a_bad_pair_is_named_by_line_and_column(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError) as error:
        load_pairs(source(tmp_path, GOOD_PAIR, row), with_margin=True)
    assert "rows.jsonl: bad rows" in str(error.value)
    assert f"line 2: {problem}" in str(error.value)


def test_several_bad_pairs_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)line 1: .*line 3: "):
        load_pairs(source(tmp_path, {"prompt": "hi"}, GOOD_PAIR, {"chosen": "yes"}))


@pytest.mark.parametrize(("label", "is_good"), [(True, True), (False, False), (1, True), (0, False)])
def test_a_verdict_is_true_or_false_one_or_zero(tmp_path: Path, label: object, is_good: bool) -> None:
    (judged,) = load_judged(source(tmp_path, {"prompt": "hi", "answer": "yes", "label": label}))
    assert judged.is_good is is_good


@pytest.mark.parametrize("label", ["good", "true", 2, -1, 0.5, 1.0])
def test_any_other_verdict_is_an_error(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match=r"line 1: `label` is .*: write true or 1 for a good answer"):
        load_judged(source(tmp_path, {"prompt": "hi", "answer": "yes", "label": label}))


def test_a_judged_row_needs_an_answer_and_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_judged(source(tmp_path, {"prompt": "hi", "label": True}, {"prompt": "hi", "answer": "yes"}))
    assert "line 1: no `answer`; it has: prompt, label (set `answer_key`)" in str(error.value)
    assert "line 2: no `label`; it has: prompt, answer (set `label_key`)" in str(error.value)


def test_a_source_that_compares_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="reasoning-gym chain_sum: has no chosen and rejected"):
        load_pairs(ReasoningGymSourceConfig(kind="reasoning_gym", name="chain_sum"))


def test_conversations_come_from_messages_or_from_a_prompt_and_its_answer(tmp_path: Path) -> None:
    ask, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    rows = source(tmp_path, {"messages": [ask, reply]}, {"prompt": "hi", "answer": "hello"})
    assert load_conversations(rows) == [(ask, reply), (ask, reply)]
    rows = source(tmp_path, {"prompt": "hi"}, {"messages": [ask], "answer": " "})
    with pytest.raises(DataError, match=r"(?s)line 1: nothing to learn.*line 2: nothing to learn"):
        load_conversations(rows)
