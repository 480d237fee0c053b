"""The policy behind `POST /v1/chat/completions`: agents that only know OpenAI's protocol are trained as they are.

The server lives in the controller's event loop, and one API key is one episode. How completions are drawn is the run's
business, for the policy gradient needs it: `temperature`, `top_p`, `seed` and fields unknown here are ignored, as is the
model's name. With `stream` the answer comes in one piece when it is whole, in the stream's form. Tools are shown as the
renderer shows them, and calls that the policy writes become `tool_calls`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

try:
    from aiohttp import web
except ImportError as error:
    raise ImportError("agents need aiohttp: pip install 'reroll[agents]'") from error

from reroll.config.agents import EndpointConfig
from reroll.errors import RerollError, RewardError
from reroll_zoo.agents.conversation import ChatExchange, Conversation, PreparedRequest, RequestRefused
from reroll_zoo.agents.openai_protocol import (
    DONE,
    Json,
    ReplyOptions,
    ReplyWriter,
    error_body,
    event,
    parse_chat_request,
    reported_score,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SHUTDOWN_S = 1.0
"""How long handlers get to notice that the server closes; nothing they do then is of use."""
_BACKLOG = 1024
"""Connections that may wait to be accepted: a step's agents all start at once."""


@dataclass(slots=True, eq=False)
class _Session:
    """An open episode and the completions it waits for."""

    conversation: Conversation
    tasks: set[asyncio.Task[ChatExchange]] = field(default_factory=set)
    is_open: bool = True


class Endpoint:
    """Answers every holder of a key. `async with Endpoint(…) as endpoint`: leaving closes the server and all episodes."""

    def __init__(self, config: EndpointConfig, *, model_name: str = "policy") -> None:
        self._config = config
        self._model_name = model_name
        self._sessions: dict[str, _Session] = {}
        self.base_url = ""
        """What an OpenAI client takes; known once the server runs."""

    @property
    def num_episodes(self) -> int:
        """Those whose key is valid."""
        return len(self._sessions)

    async def __aenter__(self) -> Endpoint:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._config.max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        # A client that hangs up cancels its handler, and with it the generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(self._runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise RerollError(
                f"the endpoint for agents cannot listen on {host}:{port} ({error}): choose another port, or 0 for a free one"
            ) from error
        reachable = "127.0.0.1" if host == "0.0.0.0" else host
        self.base_url = f"http://{reachable}:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        for key in list(self._sessions):
            await self.revoke(key)
        await self._runner.cleanup()

    def open(self, conversation: Conversation) -> str:
        """The API key of a new episode."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = _Session(conversation)
        return key

    async def revoke(self, key: str) -> None:
        """End an episode: its key is void and what it waits for is cancelled. Safe to call twice."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        session.is_open = False
        for task in session.tasks:
            task.cancel()
        await asyncio.gather(*session.tasks, return_exceptions=True)

    def _session(self, request: web.Request) -> _Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestRefused(401, "invalid_api_key", "the API key is missing, unknown, or its episode is over")
        return session

    async def _read(self, request: web.Request) -> tuple[_Session, Json]:
        self._session(request)  # Strangers are turned away before their body is read.
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise RequestRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestRefused(400, "invalid_json", "the body must be a JSON object")
        return self._session(request), body

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "reroll"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """The agent's verdict on its own episode; the last one counts."""
        session, body = await self._read(request)
        try:
            session.conversation.score = reported_score(body)
        except RewardError as error:
            raise RequestRefused(400, "invalid_reward", str(error)) from error
        return web.json_response({"reward": session.conversation.score.value})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._read(request)
        options = ReplyOptions.of(body)
        chat_request = parse_chat_request(body)
        with session.conversation.admit(chat_request) as prepared:
            reply = ReplyWriter(f"chatcmpl-{prepared.request.id}", self._model_name, options, session.conversation)
            if options.stream:
                return await self._stream(request, session, prepared, reply)
            exchange = await self._completion(session, prepared)
            session.conversation.record(prepared, exchange)
            return web.json_response(reply.complete(exchange))

    async def _stream(
        self, request: web.Request, session: _Session, prepared: PreparedRequest, reply: ReplyWriter
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(event(reply.first_chunk()))
        try:
            exchange = await self._completion(session, prepared)
        except RequestRefused as refused:  # The status line is out: what went wrong is told in the stream.
            await response.write(event(error_body(refused.status, refused.code, str(refused))) + DONE)
            return response
        await response.write(event(reply.content_chunk(exchange)))
        # On record before the agent can see the end, or its next request would find nothing to continue.
        session.conversation.record(prepared, exchange)
        await response.write(b"".join(map(event, reply.last_chunks(exchange))) + DONE)
        return response

    async def _completion(self, session: _Session, prepared: PreparedRequest) -> ChatExchange:
        task = asyncio.create_task(session.conversation.answer(prepared))
        session.tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if session.is_open or (handler and handler.cancelling()):
                raise
            raise RequestRefused(401, "episode_over", "the episode ended while this request was under way") from None
        except RequestRefused:
            raise
        except Exception as error:
            raise _break(session, error) from error
        finally:
            session.tasks.discard(task)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error in OpenAI's form."""
        try:
            return await handler(request)
        except RequestRefused as refused:
            return _error(refused.status, refused.code, str(refused))
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            return _error(413, "request_too_large", f"the body is larger than {limit} bytes: send less history")
        except web.HTTPException as error:  # No such path, or not this method.
            return _error(error.status, "unknown_url", f"{request.method} {request.path}: {error.reason}")
        except ConnectionError:  # The client is gone.
            raise
        except Exception as error:  # A bug in what serves it.
            answer = _break(self._session(request), error)
            return _error(answer.status, answer.code, str(answer))


def _break(session: _Session, error: Exception) -> RequestRefused:
    """Stop the run for an error that is no request's fault; returns what its client is told."""
    if not session.conversation.broken.done():
        session.conversation.broken.set_result(error)
    return RequestRefused(500, "run_failed", "the run that serves this model has failed")


def _error(status: int, code: str, message: str) -> web.Response:
    # OpenAI's clients try again on 409 and 500 unless told that it is useless.
    headers = {"x-should-retry": "true" if status == 429 else "false"}
    return web.json_response(error_body(status, code, message), status=status, headers=headers)
