import asyncio
import json
import math

import aiohttp
import openai
import pytest
from agent_fakes import RENDERER, Policy, conversation, say, serving, until

from reroll.config.agents import EndpointConfig
from reroll.errors import RerollError, WorkerDied
from reroll.types import FinishReason, SamplingParams, Score
from reroll_zoo.agents.endpoint import Endpoint

HI = say("user", "hi")
CHAT = {"model": "any", "messages": [HI]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def client(endpoint, key):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, timeout=60)


async def post(endpoint, key, body=CHAT, *, path="/chat/completions", method="POST"):
    """Status and JSON of a bare request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    ask = {"data": data, "headers": {"Authorization": f"Bearer {key}"} if key else {}}
    async with aiohttp.request(method, endpoint.base_url + path, **ask) as response:
        return response.status, await response.json()


async def refusal(endpoint, key, body=CHAT, **request):
    """Status and code of a request that is refused, whose body must have OpenAI's form."""
    status, answer = await post(endpoint, key, body, **request)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    return status, answer["error"]["code"]


async def chunks_of(endpoint, key, *, stream):
    """What OpenAI's client makes of an answer: all its chunks, or the one that it is."""
    async with client(endpoint, key) as agent:
        answer = await agent.chat.completions.create(model="any", messages=[HI], stream=stream)
        return [chunk async for chunk in answer] if stream else [answer]


async def test_the_async_client_gets_a_completion_and_its_tokens_are_recorded():
    async with serving() as endpoint:
        talk = conversation(Policy("ok"))
        async with client(endpoint, endpoint.open(talk)) as agent:
            answer = await agent.chat.completions.create(
                model="any", messages=[HI], logprobs=True, temperature=0.1, seed=3, user="x", max_completion_tokens=7
            )
            assert [model.id async for model in await agent.models.list()] == ["tiny"]
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "ok", "stop")
        (turn,) = talk.turns
        assert answer.usage.prompt_tokens == len(turn.prompt_ids)
        assert answer.usage.completion_tokens == len(turn.completion.token_ids) == 3
        assert answer.usage.total_tokens == len(turn.prompt_ids) + 3
        assert [(token.token, token.logprob) for token in choice.logprobs.content] == [("o", -0.5), ("k", -0.75), ("", -1.0)]
        assert turn.prompt_ids == RENDERER.start((HI,))


async def test_the_plain_client_works_from_a_thread():
    def ask():
        with openai.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as agent:
            return agent.chat.completions.create(model="any", messages=[HI]).choices[0].message.content

    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("ok")))
        assert await asyncio.to_thread(ask) == "ok"


async def test_a_stream_has_the_words_the_reason_and_the_usage_and_is_recorded():
    async with serving() as endpoint:
        talk = conversation(Policy("ok"))
        async with client(endpoint, endpoint.open(talk)) as agent:
            stream = await agent.chat.completions.create(
                model="any", messages=[HI], stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert deltas[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in deltas) == "ok"
        assert [choice.finish_reason for choice in deltas] == [None, None, "stop"]
        assert [token.logprob for choice in deltas if choice.logprobs for token in choice.logprobs.content] == [-0.5, -0.75, -1]
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]
        assert len(talk.turns) == 1


async def test_a_stream_ends_with_done_and_has_no_usage_unless_asked():
    async with serving() as endpoint, aiohttp.ClientSession() as session:
        key = endpoint.open(conversation(Policy("ok")))
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(endpoint.base_url + "/chat/completions", json=CHAT | {"stream": True}, headers=headers) as got:
            text = await got.text()
        assert got.content_type == "text/event-stream"
        *events, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events)


async def test_a_conversation_streamed_or_not_is_continued_token_for_token():
    async with serving() as endpoint:
        talk = conversation(Policy("ok"))
        async with client(endpoint, endpoint.open(talk)) as agent:
            history = [say("developer", "be kind"), {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            for number in range(4):
                if number % 2:
                    stream = await agent.chat.completions.create(model="any", messages=history, stream=True)
                    words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                    history.append({"role": "assistant", "content": [{"type": "text", "text": words}]})
                else:
                    answer = await agent.chat.completions.create(model="any", messages=history)
                    history.append(answer.choices[0].message)
                history.append(say("user", f"again {number}"))
        assert talk.turns[0].prompt_ids == RENDERER.start((say("system", "be kind"), HI))
        for before, after in zip(talk.turns, talk.turns[1:], strict=False):
            shown = (*before.prompt_ids, *before.completion.token_ids)
            assert after.prompt_ids[: len(shown)] == shown


CALLS = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add"}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_calls_to_the_client_and_their_results_go_on_from_the_sampled_tokens(stream):
    async with serving() as endpoint:
        talk = conversation(Policy(CALLS, "ok"), sampling=SamplingParams(max_tokens=500))
        async with client(endpoint, endpoint.open(talk)) as agent:
            if stream:
                chunks = [one async for one in await agent.chat.completions.create(**CHAT, tools=[TOOL], stream=True)]
                said = next(chunk.choices[0].delta for chunk in chunks if chunk.choices[0].delta.tool_calls)
                finish = chunks[-1].choices[0].finish_reason
                assert [call.index for call in said.tool_calls] == [0, 1]
            else:
                answer = await agent.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="auto")
                said, finish = answer.choices[0].message, answer.choices[0].finish_reason
            calls = [{"id": call.id, "type": "function", "function": call.function.model_dump()} for call in said.tool_calls]
            assert (said.content, finish) == ("I add.", "tool_calls")
            assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {}]
            assert len({call["id"] for call in calls}) == 2
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "three"} for call in calls]
            history = [HI, {"role": "assistant", "content": said.content, "tool_calls": calls}, *results]
            last = await agent.chat.completions.create(model="any", messages=history, tools=[TOOL])
            assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("ok", "stop")
        first, second = talk.turns
        assert first.prompt_ids == RENDERER.start((HI,), tools=[TOOL])
        shown = (*first.prompt_ids, *first.completion.token_ids)
        assert second.prompt_ids[: len(shown)] == shown
        assert RENDERER.decode(second.prompt_ids).count("three") == 2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (CALLS, {}),
        (CALLS, {"tools": [TOOL], "tool_choice": "none"}),
        (CALLS + "<tool_call>{oops", {"tools": [TOOL]}),
    ],
)
async def test_what_is_no_call_stays_text(words, options):
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy(words), sampling=SamplingParams(max_tokens=500)))
        _, answer = await post(endpoint, key, CHAT | options)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": words, "refusal": None}


async def test_a_completion_cut_short_says_so():
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("x" * 99, finish=FinishReason.LENGTH)))
        _, answer = await post(endpoint, key, CHAT | {"max_tokens": 5})
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["message"]["content"]) == ("length", "xxxxx")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{not json", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[1]", "invalid_json"),
        ({"model": "any"}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": "hi"}, "invalid_request"),
        ({"messages": ["hi"]}, "invalid_request"),
        ({"messages": [{"content": "hi"}]}, "invalid_request"),
        ({"messages": [{"role": "user"}]}, "invalid_request"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "invalid_request"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "invalid_request"),
        (CHAT | {"n": 2}, "invalid_request"),
        (CHAT | {"max_tokens": 0}, "invalid_request"),
        (CHAT | {"max_completion_tokens": 0}, "invalid_request"),
        (CHAT | {"max_tokens": "many"}, "invalid_request"),
        (CHAT | {"stop": ["a", ""]}, "invalid_request"),
        (CHAT | {"stop": 3}, "invalid_request"),
        (CHAT | {"stream_options": 3}, "invalid_request"),
        (CHAT | {"top_logprobs": 3, "logprobs": True}, "invalid_request"),
        (CHAT | {"tools": [{"type": "function"}]}, "invalid_request"),
        (CHAT | {"tools": {"name": "f"}}, "invalid_request"),
        (CHAT | {"functions": [{"name": "f"}]}, "invalid_request"),
        (CHAT | {"tools": [TOOL], "tool_choice": "required"}, "invalid_request"),
        (CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "invalid_request"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "invalid_request",
        ),
        ({"messages": [{"role": "user", "content": "half \ud800"}]}, "invalid_request"),
        ({"messages": [{"role": "half \ud800", "content": "hi"}]}, "invalid_request"),
        (CHAT | {"stop": "half \ud800"}, "invalid_request"),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "half \ud800"}}]}, "invalid_request"),
    ],
)
async def test_a_malformed_request_is_refused_and_is_no_turn(body, code):
    async with serving() as endpoint:
        talk = conversation(Policy("ok"))
        assert await refusal(endpoint, endpoint.open(talk), body) == (400, code)
        assert talk.turns == ()
        assert not talk.broken.done()


async def test_empty_wishes_are_no_wishes():
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("ok")))
        options = dict.fromkeys(["tools", "stop", "n", "max_tokens", "stream", "stream_options", "logprobs", "top_logprobs"])
        status, _ = await post(endpoint, key, CHAT | options | {"new_field": 1})
        assert status == 200


async def test_a_wrong_missing_or_expired_key_is_refused():
    async with serving() as endpoint:
        talk, other = conversation(Policy("ok")), conversation(Policy("ok"))
        key, other_key = endpoint.open(talk), endpoint.open(other)
        assert await refusal(endpoint, None) == (401, "invalid_api_key")
        assert await refusal(endpoint, "sk-guess") == (401, "invalid_api_key")
        await endpoint.revoke(key)
        await endpoint.revoke(key)
        for path in ("/chat/completions", "/reward"):
            assert await refusal(endpoint, key, {"reward": 1.0}, path=path) == (401, "invalid_api_key")
        assert await refusal(endpoint, key, path="/models", method="GET") == (401, "invalid_api_key")
        assert (await post(endpoint, other_key))[0] == 200
        assert (len(talk.turns), len(other.turns)) == (0, 1)


async def test_another_path_or_method_is_refused_in_the_same_form():
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("ok")))
        assert await refusal(endpoint, key, path="/embeddings") == (404, "unknown_url")
        assert await refusal(endpoint, key, method="GET") == (405, "unknown_url")


async def test_a_body_of_twenty_megabytes_is_refused():
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("ok")))
        huge = {"messages": [say("user", "x" * 20_000_000)]}
        assert await refusal(endpoint, key, huge) == (413, "request_too_large")
        assert await refusal(endpoint, "sk-guess", huge) == (401, "invalid_api_key")
        assert (await post(endpoint, key))[0] == 200


async def test_the_turn_limit_is_told_to_the_client_which_does_not_try_again():
    async with serving() as endpoint:
        talk = conversation(Policy("ok"), max_turns=1)
        asked = []
        admit, talk.admit = talk.admit, lambda ask: asked.append(ask) or admit(ask)
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.open(talk), max_retries=5) as agent:
            await agent.chat.completions.create(model="any", messages=[HI])
            with pytest.raises(openai.ConflictError, match="not done after 1 turns"):
                await agent.chat.completions.create(model="any", messages=[HI])
        assert len(asked) == 2


async def test_too_many_requests_at_once_are_refused_for_the_moment():
    async with serving() as endpoint:
        policy = Policy("ok", gate=asyncio.Event())
        key = endpoint.open(conversation(policy, max_turns=100))
        tasks = [asyncio.create_task(post(endpoint, key)) for _ in range(16)]
        await until(lambda: len(policy.requests) == 16)
        assert await refusal(endpoint, key) == (429, "too_many_requests")
        policy.gate.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_messages_that_leave_no_room_are_the_clients_bad_request():
    async with serving() as endpoint:
        key = endpoint.open(conversation(Policy("ok"), max_total_tokens=5))
        async with client(endpoint, key) as agent:
            with pytest.raises(openai.BadRequestError, match="leave no room within 5 tokens") as error:
                await agent.chat.completions.create(model="any", messages=[HI], stream=True)
            assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_the_generation_and_is_given_no_turn(stream):
    async with serving() as endpoint:
        policy = Policy("ok", gate=asyncio.Event())
        talk = conversation(policy, max_turns=1)
        key = endpoint.open(talk)
        task = asyncio.create_task(post(endpoint, key, CHAT | {"stream": stream}))
        await until(lambda: policy.requests)
        task.cancel()
        await until(lambda: policy.cancelled == ["3.1.0"])
        assert talk.turns == ()
        policy.gate = None
        assert (await post(endpoint, key))[0] == 200, "its turn was given back"


async def test_a_stream_left_after_its_first_chunk_cancels_the_generation():
    async with serving() as endpoint:
        policy = Policy("ok", gate=asyncio.Event())
        talk = conversation(policy)
        async with client(endpoint, endpoint.open(talk)) as agent:
            stream = await agent.chat.completions.create(model="any", messages=[HI], stream=True)
            assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
            await stream.close()
            await until(lambda: policy.cancelled)
        assert talk.turns == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_under_way_when_its_episode_ends_is_told_so(stream):
    async with serving() as endpoint:
        policy = Policy("ok", gate=asyncio.Event())
        talk = conversation(policy)
        key = endpoint.open(talk)
        task = asyncio.create_task(chunks_of(endpoint, key, stream=stream))
        await until(lambda: policy.requests)
        await endpoint.revoke(key)
        assert policy.cancelled == ["3.1.0"]
        with pytest.raises(openai.APIError, match="the episode ended while this request was under way"):
            await task
        assert talk.turns == ()


async def test_closing_the_endpoint_cancels_what_is_under_way():
    policy = Policy("ok", gate=asyncio.Event())
    async with serving() as endpoint:
        task = asyncio.create_task(post(endpoint, endpoint.open(conversation(policy))))
        await until(lambda: policy.requests)
    assert policy.cancelled
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_breaks_the_episode_and_the_client_is_told(stream):
    async with serving() as endpoint:
        talk = conversation(Policy(error=WorkerDied("engine[0] was killed")))
        with pytest.raises(openai.APIError, match="has failed"):
            await chunks_of(endpoint, endpoint.open(talk), stream=stream)
        assert isinstance(talk.broken.result(), WorkerDied)


async def test_a_reward_is_reported_with_the_episodes_key_and_the_last_one_counts():
    async with serving() as endpoint:
        talk, other = conversation(Policy("ok")), conversation(Policy("ok"))
        key, _ = endpoint.open(talk), endpoint.open(other)
        assert await post(endpoint, key, {"reward": 1}, path="/reward") == (200, {"reward": 1.0})
        status, _ = await post(endpoint, key, {"reward": 0.5, "parts": {"style": 0.25}}, path="/reward")
        assert (status, talk.score) == (200, Score(value=0.5, parts={"style": 0.25}))
        assert other.score is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": None},
        {"reward": "1"},
        {"reward": math.nan},
        {"reward": math.inf},
        {"reward": 10**400},
        {"reward": 1, "parts": 3},
        {"reward": 1, "parts": {"a": -math.inf}},
        {"reward": 1, "parts": {"a": "b"}},
    ],
)
async def test_a_reward_that_is_no_finite_number_is_refused(body):
    async with serving() as endpoint:
        talk = conversation(Policy("ok"))
        assert await refusal(endpoint, endpoint.open(talk), body, path="/reward") == (400, "invalid_reward")
        assert talk.score is None


async def test_fifty_episodes_at_once_are_kept_apart():
    async def play(number):
        talk = conversation(Policy(f"I am {number}"), id=f"{number}.0")
        async with client(endpoint, endpoint.open(talk)) as agent:
            history = [say("user", f"you are {number}")]
            for _ in range(3):
                answer = await agent.chat.completions.create(model="any", messages=history)
                history += [answer.choices[0].message, say("user", "who?")]
        return talk

    async with serving() as endpoint:
        talks = await asyncio.gather(*(play(number) for number in range(50)))
    for number, talk in enumerate(talks):
        assert [turn.text for turn in talk.turns] == [f"I am {number}"] * 3
        assert f"you are {number}" in RENDERER.decode(talk.turns[-1].prompt_ids)


async def test_a_port_that_is_taken_is_a_clear_error():
    async with serving() as endpoint:
        port = int(endpoint.base_url.rpartition(":")[2].removesuffix("/v1"))
        with pytest.raises(RerollError, match=f"cannot listen on 127.0.0.1:{port}.*0 for a free one"):
            async with Endpoint(EndpointConfig(port=port)):
                pass


async def test_an_open_host_is_reached_from_this_machine():
    async with serving(host="0.0.0.0") as endpoint:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        assert (await post(endpoint, endpoint.open(conversation(Policy("ok")))))[0] == 200
