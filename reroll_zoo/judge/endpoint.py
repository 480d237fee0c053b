"""A judge behind a server that speaks OpenAI's chat completions, with all the patience that such servers need."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from typing import Any

try:
    import aiohttp
except ImportError as error:
    raise ImportError("judges behind an endpoint need aiohttp: pip install 'reroll[agents]'") from error

from reroll.errors import RewardError
from reroll.types import Message, SamplingParams
from reroll_zoo.judge.answer import Answer, Unreadable
from reroll_zoo.judge.config import EndpointJudgeConfig
from reroll_zoo.judge.judge import Meter

_ENDED = (None, "stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Why a reply that is whole ended, in the words of various servers; some give none. Others were cut off or filtered."""
_ABOUT_THE_MESSAGES = (400, 413, 422)
"""Refusals that what was sent may be the reason for: it is too long, or may not be said."""
_MAX_BACKOFF_S = 60.0
_MAX_ASKED_S = 300.0
"""A server that asks for a longer break than this counts as unreachable."""


class EndpointModel:
    """Asks a server: so many requests at once, so many a minute, and again after faults that may pass.

    An overloaded or failing server (429, 5xx), a connection that breaks, a reply that does not come in time or is no JSON
    may be better next time; a request that is refused (other 4xx) will not.
    """

    def __init__(self, config: EndpointJudgeConfig, meter: Meter) -> None:
        self._config = config
        self._counts = meter.counts
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        self._seats = asyncio.Semaphore(config.max_in_flight)
        self._pace = _Pace(config.requests_per_minute)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        body = self._body(messages, sampling)
        async with self._seats:
            for attempt in range(self._config.retries + 1):
                await self._pace.wait()
                try:
                    return await self._post(body)
                except _Fault as fault:
                    last = fault
                if last.asked_s > _MAX_ASKED_S or attempt == self._config.retries:
                    break
                self._counts["retries"] += 1
                await self._back_off(attempt, last)
        raise RewardError(f"the judge at {self._url} gave no answer (tries: {attempt + 1}): {last}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _body(self, messages: list[Message], sampling: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self._config.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
        }
        return {name: value for name, value in (body | self._config.body).items() if value is not None}

    async def _post(self, body: dict[str, Any]) -> Answer:
        """One try."""
        try:
            async with self._open().post(self._url, json=body) as response:
                status, headers, content = response.status, response.headers, await response.read()
        except TimeoutError:
            raise _Fault(f"no reply within {self._config.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Fault(f"{type(error).__name__}: {error}") from None
        if status == 200:
            return _answer(content)
        said = content.decode("utf-8", "replace")[:300]
        reason = f"{status} {said.replace(self._key, '***') if self._key else said}"
        if status == 429 or status >= 500:
            raise _Fault(reason, asked_s=_asked_s(headers.get("Retry-After")))
        refusal = Unreadable if status in _ABOUT_THE_MESSAGES else RewardError
        raise refusal(f"the judge at {self._url} refused the request: {reason}")

    async def _back_off(self, attempt: int, fault: _Fault) -> None:
        if fault.asked_s:
            self._pace.hold(fault.asked_s)  # For all: the server spoke of itself, not of one request.
        longest_s = min(_MAX_BACKOFF_S, self._config.backoff_s * 2**attempt)
        # Those that failed together must not come back together.
        await asyncio.sleep(max(fault.asked_s, longest_s * random.uniform(0.5, 1.0)))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._config.max_in_flight),
                timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            )
        return self._session


class _Fault(Exception):
    """A try that failed in a way that may pass. The server asked for a break of `asked_s`, if it asked."""

    def __init__(self, reason: str, *, asked_s: float = 0.0) -> None:
        super().__init__(reason)
        self.asked_s = asked_s


class _Pace:
    """Spaces requests evenly, so that there are never more than so many a minute."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next_s = 0.0
        """When the next request may start."""

    async def wait(self) -> None:
        """Return when it is this request's turn."""
        now_s = time.monotonic()
        start_s = max(now_s, self._next_s)
        if self._gap_s:
            self._next_s = start_s + self._gap_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)

    def hold(self, seconds: float) -> None:
        """Let nobody start for so long."""
        self._next_s = max(self._next_s, time.monotonic() + seconds)


def _answer(content: bytes) -> Answer:
    """What a server's JSON says. A reply without words, as of a model that refused, is an empty one."""
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text, is_whole = choice["message"]["content"], choice.get("finish_reason") in _ENDED
        usage = reply.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise _Fault(f"the reply is no chat completion: {content[:200]!r}") from None
    return Answer(text=str(text or ""), is_whole=is_whole, prompt_tokens=tokens[0], completion_tokens=tokens[1])


def _asked_s(header: str | None) -> float:
    """The break that a Retry-After header asks for, given in seconds or as a date; 0 if there is none to be understood."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
