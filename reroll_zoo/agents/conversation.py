"""The chat requests of one agent's episode, kept token for token.

An agent knows text only and sends its whole history with each request. Where that history continues an exchange on
record, the prompt is that exchange's own tokens, then the new messages. Anything else (a new conversation, an edited
history) is rendered afresh, and so becomes a training row of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reroll.errors import ModelError
from reroll.rollout.play import Generate, stable_seed
from reroll.tokens.tool_calls import CALL_OPENS, Call, find_calls, write_call
from reroll.types import FinishReason, Message, Request, SamplingParams, Score, ToolSchema, Turn

if TYPE_CHECKING:  # It loads transformers, which a simulated run does not need.
    from reroll.tokens.renderer import Renderer

_MAX_AT_ONCE = 16
"""Requests that one agent may have under way: more is a runaway loop rather than a fan-out."""


class RequestRefused(Exception):
    """A request that gets no completion: the HTTP status, a code for programs, and words for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion request, as the agent sent it."""

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    """None leaves it to the run, whose limit holds in any case."""
    stop: tuple[str, ...] = ()
    """Beside the run's own. The answer's words end before the first of these."""
    tools: tuple[ToolSchema, ...] = ()
    may_call: bool = True
    """Whether calls of tools are read from the answer, or left in its words."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The policy's message, as it is sent to the agent."""

    content: str
    calls: tuple[Call, ...] = ()

    @property
    def message(self) -> Message:
        """The same in plain text, calls written out: how histories are compared, and rendered where they must be."""
        calls = [write_call(call.name, call.arguments) for call in self.calls]
        return {"role": "assistant", "content": "\n".join([*([self.content] if self.content else []), *calls])}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A chat request that was admitted, and the engine request that it becomes."""

    chat_request: ChatRequest
    number: int
    """Position among the requests of the episode."""
    request: Request
    parent: ChatExchange | None
    """The exchange that it continues."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChatExchange:
    """A chat request and its reply, in text and in tokens."""

    chat_request: ChatRequest
    number: int
    reply: ChatReply
    turn: Turn

    @property
    def history(self) -> tuple[Message, ...]:
        """How a request that continues this exchange begins."""
        return (*self.chat_request.messages, self.reply.message)

    @property
    def is_cut(self) -> bool:
        """Whether a limit of the run, not the agent's own, ended the completion."""
        completion, asked = self.turn.completion, self.chat_request.max_tokens
        return completion.finish_reason is FinishReason.LENGTH and (asked is None or len(completion.token_ids) < asked)


class Conversation:
    """All requests of one agent in one episode, which may form several conversations side by side.

    `sampling.seed` is the sample's seed, from which every request gets its own. `max_total_tokens` bounds prompt and
    completion together.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        id: str,
        max_turns: int,
        max_total_tokens: int | None = None,
    ) -> None:
        stop_token_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids)))
        self._generate = generate
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=stop_token_ids)
        self._max_turns = max_turns
        self._max_total_tokens = max_total_tokens
        self._num_asked = 0
        self._num_open = 0
        self.id = id
        self.exchanges: list[ChatExchange] = []
        """On record: the agent was given the whole answer."""
        self.limit = ""
        """The limit that refused the latest request; empty if it was let in."""
        self.is_aborted = False
        self.score: Score | None = None
        """The agent's own verdict, if it gave one."""
        self.broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Holds what stops the run, should it happen: a dead engine, or a bug."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """In the order of asking."""
        return tuple(exchange.turn for exchange in sorted(self.exchanges, key=lambda exchange: exchange.number))

    @contextmanager
    def admit(self, chat_request: ChatRequest) -> Iterator[PreparedRequest]:
        """Hold one of the episode's turns for this request until it is answered and recorded, or not. Raises RequestRefused."""
        if self._num_open >= _MAX_AT_ONCE:
            message = f"at most {_MAX_AT_ONCE} requests of an episode may be under way at once"
            raise RequestRefused(429, "too_many_requests", message)
        if len(self.exchanges) + self._num_open >= self._max_turns:
            self.limit = f"the agent was not done after {self._max_turns} turns"
            raise RequestRefused(409, "turn_limit_reached", f"{self.limit}: this episode gets no further completion")
        prepared = self._prepare(chat_request)
        self.limit = ""
        self._num_asked += 1
        self._num_open += 1
        try:
            yield prepared
        finally:
            self._num_open -= 1

    async def answer(self, prepared: PreparedRequest) -> ChatExchange:
        """Have the policy write. Raises RequestRefused, or what stopped the engine. Cancelling the call aborts the request."""
        try:
            completion = await self._generate(prepared.request)
        except ValueError as error:  # The engine's word for a request that can never run.
            self.limit = str(error)
            raise RequestRefused(400, "context_length_exceeded", self.limit) from error
        if completion.finish_reason is FinishReason.ABORT:
            self.is_aborted = True
            raise RequestRefused(503, "aborted", "the engine aborted the request")
        text = self._renderer.decode(completion.token_ids)
        shown = prepared.chat_request.messages[len(prepared.parent.history) if prepared.parent else 0 :]
        turn = Turn(prompt_ids=prepared.request.prompt_ids, completion=completion, text=text, shown=shown)
        reply = _reply_of(text, prepared.chat_request)
        return ChatExchange(chat_request=prepared.chat_request, number=prepared.number, reply=reply, turn=turn)

    def record(self, prepared: PreparedRequest, exchange: ChatExchange) -> None:
        """The agent has the answer: the turn counts, and later requests may continue it."""
        self.exchanges.append(exchange)
        parent = prepared.parent
        if parent and not parent.turn.reply:
            parent.turn = replace(parent.turn, reply=prepared.chat_request.messages[len(parent.history) :])

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as text; special tokens are empty."""
        return [self._renderer.decode((token,)) for token in token_ids]

    def _prepare(self, chat_request: ChatRequest) -> PreparedRequest:
        parent = self._parent(chat_request)
        try:
            prompt_ids = self._prompt_ids(chat_request, parent)
        except ModelError as error:
            raise RequestRefused(400, "invalid_messages", str(error)) from error
        sampling = self._sampling
        max_tokens = min(sampling.max_tokens, chat_request.max_tokens or sampling.max_tokens)
        if self._max_total_tokens is not None:
            max_tokens = min(max_tokens, self._max_total_tokens - len(prompt_ids))
        if max_tokens < 1:
            self.limit = f"the messages leave no room within {self._max_total_tokens} tokens of context"
            raise RequestRefused(400, "context_length_exceeded", f"{self.limit}: they are {len(prompt_ids)} tokens. Send fewer")
        sampling = replace(
            sampling,
            max_tokens=max_tokens,
            stop=tuple(dict.fromkeys((*sampling.stop, *chat_request.stop))),
            seed=stable_seed(sampling.seed, self._num_asked),
        )
        request = Request(id=f"{self.id}.{self._num_asked}", prompt_ids=prompt_ids, sampling=sampling)
        return PreparedRequest(chat_request=chat_request, number=self._num_asked, request=request, parent=parent)

    def _parent(self, chat_request: ChatRequest) -> ChatExchange | None:
        """The exchange that a request continues the furthest; of equals the latest, whose row is still being written."""
        continued = [exchange for exchange in self.exchanges if _continues(chat_request, exchange)]
        return max(continued, key=lambda exchange: (len(exchange.history), exchange.number), default=None)

    def _prompt_ids(self, chat_request: ChatRequest, parent: ChatExchange | None) -> tuple[int, ...]:
        if parent is None:
            return self._renderer.start(chat_request.messages, tools=chat_request.tools)
        written = parent.turn.completion.token_ids
        return self._renderer.extend(parent.turn.prompt_ids, written, chat_request.messages[len(parent.history) :])


def _continues(chat_request: ChatRequest, exchange: ChatExchange) -> bool:
    history = exchange.history
    # Tools are shown at the start of a conversation: with others, it is another one.
    return chat_request.tools == exchange.chat_request.tools and chat_request.messages[: len(history)] == history


def _reply_of(text: str, chat_request: ChatRequest) -> ChatReply:
    """The reply that a completion's text makes. As OpenAI does, without the stop string that the agent asked for.

    Text with a malformed call stays text: the agent sees what was tried.
    """
    ends = [place for word in chat_request.stop if (place := text.find(word)) >= 0]
    text = text[: min(ends, default=len(text))]
    found = find_calls(text) if chat_request.tools and chat_request.may_call else []
    calls = tuple(call for call in found if isinstance(call, Call))
    if not calls or len(calls) < len(found):
        return ChatReply(text)
    return ChatReply(text.partition(CALL_OPENS)[0].strip(), calls)
