"""OpenAI's chat protocol: requests parsed into ours, replies written in its JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reroll.errors import RewardError
from reroll.rewards.base import as_score
from reroll.tokens.tool_calls import Call
from reroll.types import Message, Score, ToolSchema
from reroll_zoo.agents.conversation import ChatExchange, ChatReply, ChatRequest, Conversation, RequestRefused

Json = dict[str, Any]

MAX_PICTURES = 128
"""Of one request, which holds all of its conversation."""
DONE = b"data: [DONE]\n\n"
"""What ends a stream."""


def reported_score(report: object) -> Score:
    """An agent's verdict: a number, a Score, or `{"reward": number, "parts": {name: number}}`, which may hold the `weights`
    of the parts and further numbers as `info`. Raises RewardError."""
    if not isinstance(report, Mapping):
        return as_score(report)
    if "reward" not in report:
        raise RewardError('the report has no reward: give {"reward": 0.5}')
    parts, weights, info = (_numbers(report, key) for key in ("parts", "weights", "info"))
    return as_score(Score(value=report["reward"], parts=parts, weights=weights, info=info))


def _numbers(report: Mapping[str, Any], key: str) -> Mapping[str, float]:
    numbers: object = report.get(key) or {}
    if not isinstance(numbers, Mapping):
        raise RewardError(f"the reward's {key} must be an object of names and numbers")
    return numbers


def event(body: Json) -> bytes:
    """One chunk of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


def error_body(status: int, code: str, message: str) -> Json:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the client wants the reply written."""

    stream: bool
    include_usage: bool
    logprobs: bool

    @classmethod
    def of(cls, body: Json) -> ReplyOptions:
        """Raises RequestRefused."""
        if body.get("n") not in (None, 1):
            raise _invalid("n must be 1: send further requests for further answers")
        if body.get("top_logprobs"):
            raise _invalid("top_logprobs are not kept: ask for logprobs, which are those of the tokens written")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise _invalid("stream_options must be an object")
        return cls(bool(body.get("stream")), bool(options.get("include_usage")), bool(body.get("logprobs")))


@dataclass(frozen=True, slots=True)
class ReplyWriter:
    """Writes a reply as OpenAI's JSON: in one piece, or as the chunks of a stream."""

    id: str
    model: str
    options: ReplyOptions
    conversation: Conversation

    def complete(self, exchange: ChatExchange) -> Json:
        """The answer to a request without `stream`."""
        reply = exchange.reply
        message: Json = {"role": "assistant", "content": reply.content or (None if reply.calls else ""), "refusal": None}
        if reply.calls:
            message["tool_calls"] = self._calls(reply)
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(exchange), "finish_reason": _finish(exchange)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(exchange)}

    def first_chunk(self) -> Json:
        """Sent before anything is generated."""
        return self._chunk({"role": "assistant", "content": ""})

    def content_chunk(self, exchange: ChatExchange) -> Json:
        """The whole content and the tool calls."""
        delta: Json = {"content": exchange.reply.content}
        if exchange.reply.calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(self._calls(exchange.reply))]
        return self._chunk(delta, logprobs=self._logprobs(exchange))

    def last_chunks(self, exchange: ChatExchange) -> list[Json]:
        """The finish reason, and the usage if it was asked for."""
        end = self._chunk({}, finish_reason=_finish(exchange))
        if not self.options.include_usage:
            return [end]
        return [end, {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(exchange)}]

    def _chunk(self, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self.options.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, object: str) -> Json:
        return {"id": self.id, "object": object, "created": int(time.time()), "model": self.model}

    def _calls(self, reply: ChatReply) -> list[Json]:
        return [
            {
                "id": f"call-{self.id}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(reply.calls)
        ]

    def _logprobs(self, exchange: ChatExchange) -> Json | None:
        if not self.options.logprobs:
            return None
        completion = exchange.turn.completion
        texts = self.conversation.spell(completion.token_ids)
        content = [
            {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
            for text, logprob in zip(texts, completion.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def parse_chat_request(body: Json) -> ChatRequest:
    """The part of a request that the policy sees. Raises RequestRefused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages is missing: give a list of at least one message")
    max_tokens = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise _invalid("max_tokens must be a positive integer")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(word, str) and word for word in stops):
        raise _invalid("stop must be a string or a list of strings, none of them empty")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise _invalid("the policy cannot be made to call a tool: tool_choice must be auto or none")
    tools = _tools_of(body)
    _check_number(messages)
    try:
        json.dumps([stops, tools], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _invalid(f"stop or tools hold half a character, or are nested too deeply: {error}") from error
    return ChatRequest(
        messages=tuple(map(_message_of, messages)),
        max_tokens=max_tokens,
        stop=tuple(stops),
        tools=tools,
        may_call=body.get("tool_choice") != "none",
    )


def _tools_of(body: Json) -> tuple[ToolSchema, ...]:
    if body.get("functions"):
        raise _invalid("functions is OpenAI's old way: send tools")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise _invalid('tools must be a list of {"type": "function", "function": {"name": …, "parameters": …}}')
    return tuple(tools)


def _message_of(message: object) -> Message:
    """A message as templates take it: parts joined, calls of tools written out."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _invalid("every message must be an object with a role and a content")
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    images: list[str] = []
    if isinstance(content, list) and all(_is_text(part) or (role != "assistant" and _is_picture(part)) for part in content):
        content, images = _text_and_images(content)
    if calls and role == "assistant" and isinstance(content, str | None):
        content = ChatReply(content or "", _calls_of(calls)).message["content"]
    if not isinstance(content, str):
        takes = "text" if role == "assistant" else "text and image_url"
        raise _invalid(f"the content of a {role} message must be text, or a list of parts of type {takes}")
    try:
        f"{role}{content}".encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"the content of a {role} message holds half a character: {error}") from error
    plain: Message = {"role": "system" if role == "developer" else role, "content": content}
    return {**plain, "images": images} if images else plain


def _text_and_images(parts: list[Json]) -> tuple[str, list[str]]:
    """Texts joined, with marks where pictures stand, and what these are kept as: histories are compared by it."""
    if all(_is_text(part) for part in parts):
        return "".join(part["text"] for part in parts), []
    from reroll_zoo.vision.parts import kept_url  # Here, or every endpoint would load Pillow.
    from reroll_zoo.vision.store import MARK

    try:
        images = [kept_url(part["image_url"]["url"]) for part in parts if not _is_text(part)]
    except ValueError as error:
        raise _invalid(f"a picture is refused: {error}") from None
    return "".join(part["text"].replace(MARK, "") if _is_text(part) else MARK for part in parts), images


def _calls_of(calls: object) -> tuple[Call, ...]:
    try:
        if not isinstance(calls, list):
            raise TypeError("not a list")
        functions = [call["function"] for call in calls]
        return tuple(Call(str(function["name"]), dict(json.loads(function["arguments"]))) for function in functions)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"tool_calls must be as they were returned, with a JSON object as arguments ({error})") from error


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_picture(part: object) -> bool:
    url = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    return isinstance(url, dict) and isinstance(url.get("url"), str)


def _check_number(messages: list[Any]) -> None:
    """Before any of them is decoded."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num = sum(_is_picture(part) for content in contents if isinstance(content, list) for part in content)
    if num > MAX_PICTURES:
        raise _invalid(f"{num} pictures are sent, and {MAX_PICTURES} are taken: send less history")


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(400, "invalid_request", message)


def _finish(exchange: ChatExchange) -> str:
    return "tool_calls" if exchange.reply.calls else exchange.turn.completion.finish_reason.value


def _usage(exchange: ChatExchange) -> Json:
    prompt, completion = len(exchange.turn.prompt_ids), len(exchange.turn.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
