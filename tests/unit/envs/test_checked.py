"""What environments return becomes plain data."""

from __future__ import annotations

from enum import StrEnum

from reroll.envs.base import StepResult
from reroll.envs.checked import as_messages, as_step_result


class Role(StrEnum):
    USER = "user"


class Words(str):
    pass


def test_texts_of_a_users_own_types_become_plain_ones() -> None:
    (message,) = as_messages([{"role": Role.USER, "content": Words("go")}], max_chars=10)
    assert message == {"role": "user", "content": "go"}
    assert [type(text) for text in message.values()] == [str, str]
    (message,) = as_messages([{"role": Role.USER, "content": "go"}], max_chars=10)
    assert type(message["role"]) is str


def test_half_a_character_that_an_environment_repeats_can_be_read_by_a_tokenizer() -> None:
    half = "you said \ud800, then \udfff\N{PILE OF POO}"
    result = as_step_result(StepResult(messages=({"role": "user", "content": half},)), max_chars=1000)
    assert result.messages[0]["content"] == "you said \N{REPLACEMENT CHARACTER}, then \N{REPLACEMENT CHARACTER}\N{PILE OF POO}"
    (message,) = as_messages([{"role": "user", "content": "é", "tools": [{"name": "\ud800"}]}], max_chars=1000)
    assert message == {"role": "user", "content": "é", "tools": [{"name": "\N{REPLACEMENT CHARACTER}"}]}
