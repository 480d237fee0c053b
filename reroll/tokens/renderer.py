"""Messages to token ids by the model's chat template, and only ever by appending: sampled ids are never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from reroll.errors import DataError, ModelError
from reroll.types import Message

_USER: Message = {"role": "user", "content": "question"}
_MARK = "@@assistant-wrote-this@@"
_ASSISTANT: Message = {"role": "assistant", "content": _MARK}


class Renderer:
    """A tokenizer and its chat template.

    What a template puts after an assistant's words is found by rendering a conversation with a mark in their place and
    reading on from the mark. The real words are never rendered again, so a template that edits history (Qwen3 drops
    the thinking of earlier turns) cannot change tokens that were sampled or trained on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: use an instruct model, "
                "or put a chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        closing = self._encode(self._after_mark([_USER, _ASSISTANT], generation_prompt=False))
        marked = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        specials = [place for place, token in enumerate(closing) if token in marked]
        self._num_closing_ids = specials[0] + 1 if specials else 0
        """Tokens after an assistant's words up to the one that ends its turn; 0 if the template has no such token."""
        eos = tokenizer.eos_token_id
        self._closing_ids = closing[: self._num_closing_ids] or (eos,)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((eos, self._closing_ids[-1])))
        """Tokens that end a completion: end of sequence and the template's end of turn."""

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a first turn: the conversation and the cue for the assistant to speak."""
        return self._encode(self._render(messages, generation_prompt=True))

    def extend(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a next turn: what was shown, what was sampled, then `messages` and the cue to speak again.

        A completion that was cut before its end of turn is closed here, as the template would have closed it.
        """
        tail = self._encode(self._after_mark([_USER, _ASSISTANT, *messages], generation_prompt=True))
        if completion_ids and completion_ids[-1] in self.stop_token_ids:
            tail = tail[self._num_closing_ids :]
        return (*prompt_ids, *completion_ids, *tail)

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def training_row(self, messages: Sequence[Message], *, start: int = 0) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids and loss mask of a conversation to imitate: loss on what the assistant says and on ending its turn.

        Built turn by turn as a rollout would build it, so training sees what generation sees. What the assistant says
        before message `start` is history, without loss. Messages after its last one are dropped: nothing is learned
        from them.
        """
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            problem = "starts with" if turns else "has no"
            raise DataError(f"the conversation {problem} an assistant message: give the user's message, then the assistant's")
        ids = self.start(messages[: turns[0]])
        mask = [False] * len(ids)
        for turn, next_turn in zip(turns, [*turns[1:], None], strict=True):
            said = (*self._encode(messages[turn]["content"]), *self._closing_ids)
            mask += [turn >= start] * len(said)
            ids = (*ids, *said) if next_turn is None else self.extend(ids, said, messages[turn + 1 : next_turn])
            mask += [False] * (len(ids) - len(mask))
        return ids, tuple(mask)

    def _after_mark(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._render(messages, generation_prompt=generation_prompt)
        _, mark, rest = text.partition(_MARK)
        if not mark:
            raise ModelError(
                f"the chat template of {self._tokenizer.name_or_path!r} leaves out what the assistant says: "
                "use a template that shows it"
            )
        return rest

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation_prompt)
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(
                f"the chat template of {self._tokenizer.name_or_path!r} cannot show messages of roles {roles}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
