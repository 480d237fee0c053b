"""Formats of families whose turns are more than words between two marks: what a chat template cannot say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from reroll.config.registry import entry_names, load_entry
from reroll.types import Message


class ChatFormat(Protocol):
    """Reads and writes the assistant's turns of one family. Everywhere else a turn is text: thinking in `<think>`, calls in
    `<tool_call>`."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a turn, beside the template's own."""

    def read(self, ids: Sequence[int]) -> str | None:
        """The text of a turn. None: these tokens are no turn, and mean what they spell."""

    def write(self, content: str, *, to_imitate: bool) -> str:
        """A turn with this text, from behind the cue to its end: with its thinking if it is one to imitate, else as history."""

    def follow(self, said: Sequence[int], messages: Sequence[Message]) -> str:
        """What comes after the tokens of a turn: its end, if it was cut, the messages, and the cue to speak again."""


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat | None:
    """That of this tokenizer's family; None if its template says all."""
    for name in entry_names("reroll.chat_formats"):
        found: ChatFormat | None = load_entry("reroll.chat_formats", name)(tokenizer)
        if found is not None:
            return found
    return None
