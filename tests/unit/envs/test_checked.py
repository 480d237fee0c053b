"""What environments return becomes plain data."""

from __future__ import annotations

from enum import StrEnum

from reroll.envs.checked import as_messages


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
