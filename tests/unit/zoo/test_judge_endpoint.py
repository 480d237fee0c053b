"""A judge behind a server that misbehaves in every way such servers do."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from reroll.errors import ConfigError, RewardError
from reroll.rewards.base import RewardContext
from reroll.types import Completion, FinishReason, Message, Prompt, SamplingParams, Score, Status, Trajectory, Turn
from reroll_zoo.judge.answer import Answer
from reroll_zoo.judge.config import EndpointJudgeConfig, JudgeConfig
from reroll_zoo.judge.endpoint import EndpointModel
from reroll_zoo.judge.judge import Meter, open_judge

MESSAGES = [Message(role="user", content="Is it right?")]
SAMPLING = SamplingParams(max_tokens=50, temperature=0.5, seed=3)
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(text: str | None = "Score: 7") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message}], "usage": {"prompt_tokens": 2000, "completion_tokens": 100}}


class Server:
    """Speaks chat completions; the first requests meet the behaviours in `script`, all others are answered."""

    def __init__(self) -> None:
        self.script: list[Behaviour] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times_s: list[float] = []
        self.num_open = self.most_open = 0
        self.delay_s = 0.0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.times_s.append(time.monotonic())
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.script:
                return await self.script.pop(0)(request)
            await asyncio.sleep(self.delay_s)
            return web.json_response(reply())
        finally:
            self.num_open -= 1


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    it = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", it.answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    it.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield it
    await runner.cleanup()


def config(server: Server, **options: Any) -> EndpointJudgeConfig:
    return EndpointJudgeConfig.model_validate(
        {"kind": "endpoint", "url": server.url, "model": "wise", "backoff_s": 0.01, "timeout_s": 60} | options
    )


async def ask(server: Server, **options: Any) -> tuple[Answer, int]:
    """The answer, and how many retries it took."""
    meter = Meter()
    model = EndpointModel(config(server, **options), meter)
    try:
        return await model(MESSAGES, SAMPLING), meter.counts["retries"]
    finally:
        await model.close()


def status(code: int, text: str = "oh", **headers: str) -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return behave


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def disconnect(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def half_a_reply(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


def body(content: str) -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        return web.Response(text=content, content_type="application/json")

    return behave


async def test_a_question_travels_as_openai_wants_it_and_the_reply_brings_its_tokens(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", "sk-secret")
    answer, _ = await ask(server, api_key_env="TEST_JUDGE_KEY", body={"seed": None, "top_p": 0.9}, url=f"{server.url}/")
    assert answer == Answer(text="Score: 7", prompt_tokens=2000, completion_tokens=100)
    assert server.keys == ["Bearer sk-secret"]
    expected = {"model": "wise", "messages": MESSAGES, "temperature": 0.5, "max_tokens": 50, "top_p": 0.9}
    assert server.bodies == [expected]


@pytest.mark.parametrize(
    "fault",
    [
        status(429),
        status(500),
        status(502, "<html>bad gateway</html>"),
        status(503),
        disconnect,
        half_a_reply,
        body("not json"),
        body('{"error": {"message": "overloaded"}}'),
        body('{"choices": []}'),
        body("[1]"),
    ],
)
async def test_a_fault_that_may_pass_is_tried_again(server: Server, fault: Behaviour) -> None:
    server.script = [fault, fault]
    answer, num_retries = await ask(server)
    assert (answer.text, num_retries, len(server.bodies)) == ("Score: 7", 2, 3)


async def test_a_server_that_hangs_is_given_up_and_tried_again(server: Server) -> None:
    server.script = [hang]
    answer, num_retries = await ask(server, timeout_s=0.5, retries=200)  # A busy machine may need several.
    assert answer.text == "Score: 7"
    assert num_retries >= 1


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
async def test_a_refused_request_is_not_tried_again(server: Server, code: int) -> None:
    server.script = [status(code, "no such key: sk-secret")]
    with pytest.raises(RewardError, match=f"refused the request: {code} no such key"):
        await ask(server)
    assert len(server.bodies) == 1


async def test_a_key_never_stands_in_a_reason(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", "sk-secret")
    server.script = [status(401, "bad key sk-secret")]
    with pytest.raises(RewardError, match=r"bad key \*\*\*"):
        await ask(server, api_key_env="TEST_JUDGE_KEY")


async def test_a_server_that_stays_broken_is_a_reward_error_with_the_last_reason(server: Server) -> None:
    server.script = [status(500, "first"), status(503, "second"), status(500, "third")]
    with pytest.raises(RewardError, match=r"gave no answer \(tries: 3\): 500 third"):
        await ask(server, retries=2)


async def test_a_server_that_is_not_there_is_a_reward_error() -> None:
    nowhere = Server()
    nowhere.url = "http://127.0.0.1:9/v1"
    with pytest.raises(RewardError, match=r"gave no answer \(tries: 2\): ClientConnectorError"):
        await ask(nowhere, retries=1)


async def test_retries_wait_as_long_as_the_server_asks(server: Server) -> None:
    server.script = [status(429, Retry_After="0.4")]
    await ask(server)
    first, second = server.times_s
    assert second - first >= 0.4


async def test_a_break_that_the_server_asks_for_holds_for_all(server: Server) -> None:
    server.script = [status(429, Retry_After="0.4")]
    model = EndpointModel(config(server), Meter())
    first = asyncio.create_task(model(MESSAGES, SAMPLING))
    while not server.bodies:
        await asyncio.sleep(0.01)
    for _ in range(20):  # The answer is read in a few turns of the loop, however long each takes.
        await asyncio.sleep(0.005)
    await asyncio.gather(first, *(model(MESSAGES, SAMPLING) for _ in range(3)))
    await model.close()
    assert len(server.times_s) == 5
    assert all(start_s - server.times_s[0] >= 0.4 for start_s in server.times_s[1:])


async def test_a_break_may_be_given_as_a_date_and_one_of_an_hour_is_too_long(server: Server) -> None:
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    server.script = [status(503, "closed", Retry_After=later)]
    with pytest.raises(RewardError, match=r"gave no answer \(tries: 1\): 503 closed"):
        await ask(server)


@pytest.mark.parametrize("header", ["soon", "", "-5", "nan"])
async def test_a_break_that_cannot_be_understood_is_no_break(server: Server, header: str) -> None:
    server.script = [status(429, Retry_After=header)]
    assert (await ask(server))[1] == 1


async def test_waits_grow_from_retry_to_retry(server: Server) -> None:
    server.script = [status(500)] * 3
    await ask(server, backoff_s=0.1)
    gaps_s = [later - earlier for earlier, later in zip(server.times_s, server.times_s[1:], strict=False)]
    assert all(gap_s >= least_s for gap_s, least_s in zip(gaps_s, (0.05, 0.1, 0.2), strict=True))


async def test_no_more_requests_are_under_way_than_allowed(server: Server) -> None:
    server.delay_s = 0.05
    model = EndpointModel(config(server, max_in_flight=3), Meter())
    await asyncio.gather(*(model(MESSAGES, SAMPLING) for _ in range(9)))
    await model.close()
    assert server.most_open == 3


async def test_requests_are_spaced_by_the_minute(server: Server) -> None:
    model = EndpointModel(config(server, requests_per_minute=300), Meter())
    await asyncio.gather(*(model(MESSAGES, SAMPLING) for _ in range(6)))
    await model.close()
    # They set out over 5 × 0.2 s; on a busy machine the first may arrive late.
    assert max(server.times_s) - min(server.times_s) >= 0.5


async def test_a_reply_without_words_is_an_empty_one(server: Server) -> None:
    server.script = [body('{"choices": [{"message": {"content": null}}]}')]
    assert await ask(server) == (Answer(text=""), 0)


@pytest.mark.parametrize(("reason", "is_whole"), [("stop", True), (None, True), ("length", False), ("content_filter", False)])
async def test_a_reply_that_the_model_did_not_end_is_not_whole(server: Server, reason: str | None, is_whole: bool) -> None:
    choice = {"message": {"content": "It says: Score: 10"}, "finish_reason": reason}
    server.script = [body(json.dumps({"choices": [choice]}))]
    answer, _ = await ask(server)
    assert answer.is_whole is is_whole


async def test_an_answer_that_the_server_refuses_is_the_worst_and_a_server_that_refuses_all_fails_the_sample(
    server: Server,
) -> None:
    it = open_judge(judging(server), RewardContext(name="p"))
    server.script = [status(400, "the context is too long")]  # What comes next is answered.
    assert await it(PROMPT, said("long " * 10)) == Score(value=0.0, info={"unjudged": 1.0})
    server.script = [status(400, "unknown parameter")] * 2
    with pytest.raises(RewardError, match="refused the request: 400 unknown parameter"):
        await it(PROMPT2, said("short"))
    await it.close()


PROMPT2 = Prompt(id="p/1", messages=(Message(role="user", content="Another?"),), domain="p")
PROMPT = Prompt(id="p/0", messages=tuple(MESSAGES), domain="p")


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


def judging(server: Server, **options: Any) -> JudgeConfig:
    model = config(server, price_per_million_prompt_tokens=2.5, price_per_million_completion_tokens=10.0)
    return JudgeConfig.model_validate({"kind": "judge", "model": model.model_dump()} | options)


async def test_a_judges_metrics_tell_what_it_did_and_what_it_cost(server: Server) -> None:
    server.script = [status(500), status(403, "no")]
    it = open_judge(judging(server), RewardContext(name="p"))
    with pytest.raises(RewardError, match="403 no"):
        await it(PROMPT, said("one"))
    scores = [(await it(PROMPT, said(text))).value for text in ("one", "two", "one")]
    assert scores == [0.7, 0.7, 0.7]
    told = it.stats().values_by_name()
    await it.close()
    assert told["reward/judge/p/requests"] == 3
    assert told["reward/judge/p/retries"] == 1
    assert told["reward/judge/p/failures"] == 1
    assert told["reward/judge/p/cache_hits"] == 1
    assert told["reward/judge/p/prompt_tokens"] == 4000
    assert told["reward/judge/p/completion_tokens"] == 200
    assert told["reward/judge/p/cost"] == pytest.approx(4000 * 2.5e-6 + 200 * 10e-6)
    assert 0 < told["reward/judge/p/latency_s"] <= told["reward/judge/p/latency_max_s"]


async def test_a_slow_judge_does_not_hold_up_another(server: Server) -> None:
    server.script = [hang]
    slow, quick = (open_judge(judging(server), RewardContext(name=name)) for name in ("slow", "quick"))
    waiting = asyncio.create_task(slow(PROMPT, said("one")))
    while not server.bodies:
        await asyncio.sleep(0.01)
    assert (await quick(PROMPT, said("two"))).value == 0.7
    assert not waiting.done()
    waiting.cancel()
    await slow.close()
    await quick.close()


def test_a_key_that_is_not_set_ends_the_run_before_it_starts() -> None:
    model = {"kind": "endpoint", "url": "http://here/v1", "model": "wise", "api_key_env": "REROLL_TEST_NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match=r"rewards.p.model.api_key_env: .*REROLL_TEST_NO_SUCH_KEY is not set \(export"):
        open_judge(JudgeConfig.model_validate({"kind": "judge", "model": model}), RewardContext(name="p"))
