"""Harmony, the chat format of gpt-oss: a turn has channels for thinking, for calls and for what the user gets to see.

    <|channel|>analysis<|message|>7 + 8 = 15<|end|>
    <|start|>assistant<|channel|>final<|message|>15<|return|>

reads as `<think>7 + 8 = 15</think>` and `15`. A call, to which a tool answers before the assistant speaks again,

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7, "b": 8}<|call|>
    <|start|>functions.add to=assistant<|channel|>commentary<|message|>"15"<|end|>

reads as `<tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>`. A turn ends with its first call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from reroll.errors import DataError
from reroll.tokens.tool_calls import CALL_OPENS, Call, find_calls, read_json, write_call
from reroll.types import Message

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_CUE = f"{_START}assistant"
_TO = re.compile(r"to=functions\.([^\s<]+)")
_NO_CALL = "tool"
"""Who answers a turn that called nobody."""


def open_harmony(tokenizer: PreTrainedTokenizerBase) -> Harmony | None:
    """For a tokenizer that has the format's marks."""
    ids = tokenizer.get_vocab()
    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    return Harmony(tokenizer, {mark: ids[mark] for mark in marks}) if all(mark in ids for mark in marks) else None


@dataclass(frozen=True, slots=True)
class _ChannelMessage:
    """One message of a turn: `header` says its channel and whom it is for; `end` is empty if it was cut."""

    header: str
    body: str
    end: str

    @property
    def called(self) -> str | None:
        """The tool that this is for."""
        found = _TO.search(self.header)
        return found[1] if found else None

    @property
    def text(self) -> str:
        if self.called is not None:
            return _call_text(self.called, self.body)
        if "analysis" in self.header.split():
            return f"<think>{self.body}</think>" if self.end else f"<think>{self.body}"
        return self.body


class Harmony:
    """Reads and writes the turns of gpt-oss."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._marks = {id: mark for mark, id in marks.items()}
        self.stop_token_ids = (marks[_RETURN], marks[_CALL])

    def read(self, ids: Sequence[int]) -> str | None:
        if not any(self._marks.get(id) == _CHANNEL for id in ids):
            return None
        return "\n".join(message.text for message in self._channel_messages(ids))

    def write(self, content: str, *, to_imitate: bool) -> str:
        thought, closed, said = content.rpartition("</think>")
        said = said.lstrip("\n") if closed else said
        text = ""
        if closed and to_imitate:
            thinking = thought.partition("<think>")[2] or thought
            text = f"{_CHANNEL}analysis{_MESSAGE}{thinking}{_END}{_CUE}"
        calls = find_calls(said)
        if to_imitate and len(calls) > 1:
            raise DataError("an assistant's message has several calls, and gpt-oss makes one a turn: give each its own message")
        if len(calls) == 1 and isinstance(call := calls[0], Call):
            if preamble := said.partition(CALL_OPENS)[0].strip():
                text += f"{_CHANNEL}commentary{_MESSAGE}{preamble}{_END}{_CUE}"
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            return f"{text}{_CHANNEL}commentary to=functions.{call.name} {_CONSTRAIN}json{_MESSAGE}{arguments}{_CALL}"
        return f"{text}{_CHANNEL}final{_MESSAGE}{said}{_RETURN if to_imitate else _END}"

    def follow(self, said: Sequence[int], messages: Sequence[Message]) -> str:
        called = [message.called for message in self._channel_messages(said)]
        who = (called[-1] if called else None) or _NO_CALL
        is_over = bool(said) and self._marks.get(said[-1]) in _ENDS
        return "".join(("" if is_over else _END, *(_shown(message, who=who) for message in messages), _CUE))

    def _channel_messages(self, ids: Sequence[int]) -> Iterator[_ChannelMessage]:
        """The messages of a turn, which begins behind the cue."""
        header, since, in_body = "", 0, False
        for place, mark in [*((place, self._marks.get(id)) for place, id in enumerate(ids)), (len(ids), "")]:
            if mark is None:
                continue
            words, since = self._spell(ids[since:place]), place + 1
            if not in_body:
                header, in_body = f"{header} {words}", mark == _MESSAGE
            elif mark in (*_ENDS, _START, ""):
                yield _ChannelMessage(header, words, mark)
                header, in_body = "", False

    def _spell(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _call_text(name: str, body: str) -> str:
    """What is not JSON stands as it was written: who finds it there says that it is none."""
    try:
        arguments = read_json(body)
    except ValueError:
        arguments = None
    return write_call(name, arguments if isinstance(arguments, dict) else body)


def _shown(message: Message, *, who: str) -> str:
    content = message["content"]
    match message["role"]:
        case "tool":
            result = json.dumps(content, ensure_ascii=False)
            return f"{_START}functions.{who} to=assistant{_CHANNEL}commentary{_MESSAGE}{result}{_END}"
        case "system" | "developer":
            return f"{_START}developer{_MESSAGE}# Instructions\n\n{content}{_END}"
        case role:
            return f"{_START}{role}{_MESSAGE}{content}{_END}"
