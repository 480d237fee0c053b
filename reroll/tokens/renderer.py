"""Messages to token ids by the model's chat template, and only ever by appending: sampled ids are never re-tokenised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from reroll.config.registry import load_entry
from reroll.errors import DataError, ModelError
from reroll.tokens.chat_format import chat_format
from reroll.tokens.pictures import images_of, pictures
from reroll.tokens.tool_calls import CALL_OPENS
from reroll.types import Message, ToolSchema

_USER: Message = {"role": "user", "content": "question"}
_MARK = "@@assistant-wrote-this@@"
_ASSISTANT: Message = {"role": "assistant", "content": _MARK}
_RESULT = "@@tool-answered-this@@"
_TOOL: ToolSchema = {"type": "function", "function": {"name": "@@tool@@", "description": "-", "parameters": {"type": "object"}}}
_HOW_TO_CALL = """You can call tools. Their JSON schemas, one a line:
{schemas}
Call a tool by writing <tool_call>{{"name": tool name, "arguments": JSON object}}</tool_call>, one for each call. \
You then get each result in <tool_response></tool_response>."""

_NUM_STARTS_KEPT = 256
"""Prompts whose tokens are remembered: siblings start with the same words."""


class PictureTokens(Protocol):
    """How a model's processor puts pictures among tokens: what the entry point `tokens` of the group `reroll.vision` opens,
    given a tokenizer. It raises ModelError if that belongs to a model that sees nothing."""

    def parts(self, message: Message) -> list[dict[str, str]]:
        """The content of a message as chat templates take it that show pictures."""

    def encode(self, text: str, images: Sequence[str]) -> tuple[int, ...]:
        """Text as the chat template shows it, in which these pictures have their placeholders, in order."""


class Renderer:
    """A tokenizer and its chat template.

    What a template puts after an assistant's words is found by rendering a conversation with a mark in their place and
    reading on from the mark. The real words are never rendered again, so a template that edits history (Qwen3 drops
    the thinking of earlier turns) cannot change tokens that were sampled or trained on.

    Tools are called in one format, `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen). Where the template
    teaches another or none, the system message describes the tools, and their results are shown as the user's words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, folder: Path | None = None) -> None:
        """The pictures that are shown in a run are written to its `folder` of them; what lies there is known."""
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: use an instruct model, "
                "or put a chat_template.jinja into its folder"
            )
        self.tokenizer = tokenizer
        self._folder, self._pictures = folder, cast("PictureTokens | None", None)
        self._takes_parts = False
        self._takes_parts = not self._shows_text()
        self._start = lru_cache(maxsize=_NUM_STARTS_KEPT)(self._encode_start)
        self._format = chat_format(tokenizer)
        self._knows_tools = self._format is not None or self._is_fluent_in_tools()
        closing = self._encode(self._after_mark([_USER, _ASSISTANT], generation_prompt=False))
        marked = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        specials = [place for place, token in enumerate(closing) if token in marked]
        self._num_closing_ids = specials[0] + 1 if specials else 0
        """Tokens after an assistant's words up to the one that ends its turn; 0 if the template has no such token."""
        eos = tokenizer.eos_token_id
        self._closing_ids = closing[: self._num_closing_ids] or (eos,)
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys((eos, self._closing_ids[-1], *(self._format.stop_token_ids if self._format else ())))
        )
        """Tokens that end a completion: end of sequence and the template's end of turn."""

    def start(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """The prompt of a first turn: the conversation and the cue for the assistant to speak.

        What it may call are `tools` and those that the messages bring along.
        """
        return self._start(json.dumps([messages, tools]))

    def kept(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with their pictures in the run's folder, and by name: what may be stored and sent at will."""
        folder = self._folder
        return tuple(pictures().filed(each, folder) for each in messages) if folder and images_of(messages) else messages

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation as the template shows one that is over: with all it puts behind the last message, and no cue."""
        return self._encode(self._show(messages, (), generation_prompt=False), images_of(messages))

    def extend(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a next turn: what was shown, what was sampled, then `messages` and the cue to speak again.

        A completion that was cut before its end of turn is closed here, as the template would have closed it.
        """
        if self._format is not None:
            followed = self._format.follow(completion_ids, messages)
            return (*prompt_ids, *completion_ids, *self._encode(followed, images_of(messages)))
        tail = self._encode(self._after_mark([_USER, _ASSISTANT, *messages], generation_prompt=True), images_of(messages))
        if completion_ids and completion_ids[-1] in self.stop_token_ids:
            tail = tail[self._num_closing_ids :]
        return (*prompt_ids, *completion_ids, *tail)

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Text, without special tokens unless they are asked for."""
        if self._format is not None and not with_special and (read := self._format.read(ids)) is not None:
            return read
        if isinstance(self.tokenizer, PreTrainedTokenizerFast):  # Straight to Rust: the wrapper looks at every id in Python.
            return self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not with_special)
        text = self.tokenizer.decode(list(ids), skip_special_tokens=not with_special, clean_up_tokenization_spaces=False)
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
            said = self._said(messages[turn]["content"])
            mask += [turn >= start] * len(said)
            ids = (*ids, *said) if next_turn is None else self.extend(ids, said, messages[turn + 1 : next_turn])
            mask += [False] * (len(ids) - len(mask))
        return ids, tuple(mask)

    def _said(self, content: str) -> tuple[int, ...]:
        """A turn to imitate, with its end."""
        if self._format is not None:
            return self._encode(self._format.write(content, to_imitate=True))
        return (*self._encode(content), *self._closing_ids)

    def _encode_start(self, messages_and_tools: str) -> tuple[int, ...]:
        messages, tools = json.loads(messages_and_tools)
        return self._encode(self._show(messages, tools, generation_prompt=True), images_of(messages))

    def _show(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation_prompt: bool) -> str:
        tools = [*tools, *(tool for message in messages for tool in message.get("tools", ()))]
        if tools and not self._knows_tools:
            messages, tools = _describe(tools, messages), []
        if self._format is None:
            return self._render(messages, generation_prompt=generation_prompt, tools=tools)
        turns = [*(place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages)]
        text = self._render(messages[: turns[0]], generation_prompt=generation_prompt or len(turns) > 1, tools=tools)
        for turn, next_turn in pairwise(turns):
            said, after = self._format.write(messages[turn]["content"], to_imitate=False), messages[turn + 1 : next_turn]
            text += said
            if after or generation_prompt:
                text += self._format.follow(self._encode(said), after)
        return text

    def _after_mark(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._render(messages, generation_prompt=generation_prompt)
        _, mark, rest = text.partition(_MARK)
        if not mark:
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out what the assistant says: "
                "use a template that shows it"
            )
        return rest

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool, tools: Sequence[ToolSchema] = ()) -> str:
        if not self._knows_tools:
            messages = _results_as_user(messages)
        try:
            return self._apply_template(messages, generation_prompt=generation_prompt, tools=tools)
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot show messages of roles {roles}: {error}"
            ) from error

    def _shows_text(self) -> bool:
        """Whether the template shows content that is text. Some show parts only."""
        try:
            return _MARK in self._apply_template([_USER, _ASSISTANT], generation_prompt=False, tools=())
        except (jinja2.TemplateError, TypeError):
            return False

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """As templates take it."""
        if message.get("images"):
            return self._open_pictures().parts(message)
        return [{"type": "text", "text": message["content"]}] if self._takes_parts else message["content"]

    def _apply_template(self, messages: Sequence[Message], *, generation_prompt: bool, tools: Sequence[ToolSchema]) -> str:
        shown: list[dict[str, Any]] = [{"role": message["role"], "content": self._content(message)} for message in messages]
        text = self.tokenizer.apply_chat_template(
            shown,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def _is_fluent_in_tools(self) -> bool:
        """Whether the template teaches our format of calls, and shows results that follow a call written as plain text."""
        conversation: list[Message] = [_USER, _ASSISTANT, {"role": "tool", "content": _RESULT}]
        try:
            text = self._apply_template(conversation, generation_prompt=True, tools=[_TOOL])
        except (jinja2.TemplateError, TypeError):  # It refuses the role, or expects calls in fields of their own.
            return False
        return all(part in text for part in (_TOOL["function"]["name"], CALL_OPENS, '"arguments"', _RESULT))

    def _encode(self, text: str, images: Sequence[str] = ()) -> tuple[int, ...]:
        if not images:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return self._open_pictures().encode(text, images)

    def _open_pictures(self) -> PictureTokens:
        if self._pictures is None:
            self._pictures = cast(PictureTokens, load_entry("reroll.vision", "tokens")(self.tokenizer))
            if self._folder is not None:
                pictures().look_in(self._folder)
        return self._pictures


def _describe(tools: Sequence[ToolSchema], messages: Sequence[Message]) -> list[Message]:
    """The conversation with the tools, and how to call them, in its system message."""
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _HOW_TO_CALL.format(schemas=schemas)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Tool results as the user's words; those that follow each other in one message, since many templates want turns."""
    shown: list[Message] = []
    for message, before in zip(messages, [None, *messages], strict=False):
        if message["role"] != "tool":
            shown.append(message)
            continue
        text, images = f"<tool_response>\n{message['content']}\n</tool_response>", message.get("images", [])
        if before is not None and before["role"] == "tool":
            earlier = shown.pop()
            text, images = f"{earlier['content']}\n{text}", [*earlier.get("images", []), *images]
        shown.append({"role": "user", "content": text, "images": images} if images else {"role": "user", "content": text})
    return shown
