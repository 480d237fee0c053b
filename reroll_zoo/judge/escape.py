"""A policy's words inside of another model's prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from reroll.types import Message


class SpecialTokenEscaper:
    """Escapes the special tokens of a chat template in messages, so that an answer cannot end its own turn in a judge's prompt.

    The text of such a token is escaped by a space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        marks = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)))  # There is one: every tokenizer here has an end of sequence.

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        return [self._escaped(message) for message in messages]

    def _escaped(self, message: Message) -> Message:
        escaped = message.copy()
        escaped["content"] = self._marks.sub(lambda match: f"{match[0][0]} {match[0][1:]}", message["content"])
        return escaped
