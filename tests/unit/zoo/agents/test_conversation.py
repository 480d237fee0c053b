import asyncio
import json

import numpy as np
import pytest
from agent_fakes import RENDERER, Policy, conversation, say, spelled
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.rollout.play import stable_seed
from reroll.tokens.samples import rows_of
from reroll.tokens.tool_calls import Call
from reroll.types import FinishReason, Group, Prompt, SamplingParams, Status, Trajectory
from reroll_zoo.agents.conversation import ChatReply, ChatRequest, RequestRefused

HI = say("user", "hi")
MORE = say("user", "more")


async def exchange(talk, *messages, record=True, **options):
    with talk.admit(ChatRequest(messages=messages, **options)) as prepared:
        done = await talk.answer(prepared)
        if record:
            talk.record(prepared, done)
        return done


def rows(talk):
    """The training rows of an episode, by the rule of the pipeline."""
    trajectory = Trajectory(id="t", turns=talk.turns, status=Status.COMPLETED)
    prompt = Prompt(id="p", messages=(HI,), domain="d")
    return rows_of([Group(number=0, prompt=prompt, trajectories=(trajectory,), version=0)]).samples


async def test_a_history_that_goes_on_keeps_the_sampled_tokens():
    talk = conversation(Policy("ok"))
    first = await exchange(talk, HI)
    assert first.reply.message == say("assistant", "ok")
    assert first.turn.completion.token_ids[:2] == spelled("ok")
    second = await exchange(talk, HI, first.reply.message, MORE)
    shown = (*first.turn.prompt_ids, *first.turn.completion.token_ids)
    assert second.turn.prompt_ids[: len(shown)] == shown
    afresh = RENDERER.start((HI, first.reply.message, MORE))
    assert RENDERER.decode(afresh) == RENDERER.decode(second.turn.prompt_ids)
    assert len(afresh) == len(second.turn.prompt_ids) - 1, "tokenised again, `ok` would be one token"
    assert len(rows(talk)) == 1
    assert talk.turns[0].reply == (MORE,)
    assert talk.turns[1].reply == ()
    assert [turn.shown for turn in talk.turns] == [(HI,), (MORE,)]


async def test_an_edited_history_is_rendered_afresh_and_is_a_row_of_its_own():
    talk = conversation(Policy("ok"))
    await exchange(talk, HI)
    edited = (HI, say("assistant", "ok then"), MORE)
    second = await exchange(talk, *edited)
    assert second.turn.prompt_ids == RENDERER.start(edited)
    assert second.turn.shown == edited
    assert len(rows(talk)) == 2


async def test_a_new_conversation_is_rendered_afresh():
    talk = conversation(Policy("ok"))
    await exchange(talk, HI)
    other = await exchange(talk, MORE)
    assert other.turn.prompt_ids == RENDERER.start((MORE,))


async def test_branches_share_the_tokens_they_grew_from():
    talk = conversation(Policy("ok"))
    root = await exchange(talk, HI)
    shown = (*root.turn.prompt_ids, *root.turn.completion.token_ids)
    for words in ("left", "right"):
        branch = await exchange(talk, HI, root.reply.message, say("user", words))
        assert branch.turn.prompt_ids[: len(shown)] == shown
    assert [int(row.loss_mask.sum()) for row in rows(talk)] == [6, 3], "the root is learned from once"


async def test_with_other_tools_it_is_another_conversation():
    talk = conversation(Policy("ok"))
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    first = await exchange(talk, HI)
    messages = (HI, first.reply.message, MORE)
    second = await exchange(talk, *messages, tools=tools)
    assert second.turn.prompt_ids == RENDERER.start(messages, tools=tools) != RENDERER.start(messages)


async def test_a_call_whose_arguments_the_agent_wrote_anew_is_still_its_own():
    policy = Policy('<tool_call>{"arguments":{"b": 2,"a":1.0},"name":"add"}</tool_call> and more', "ok")
    talk = conversation(policy, sampling=SamplingParams(max_tokens=500))
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    first = await exchange(talk, HI, tools=tools)
    assert first.reply == ChatReply("", (Call("add", {"b": 2, "a": 1.0}),))
    echoed = ChatReply("", (Call("add", json.loads('{"b":2,   "a":1.0}')),)).message
    second = await exchange(talk, HI, echoed, say("tool", "3"), tools=tools)
    shown = (*first.turn.prompt_ids, *first.turn.completion.token_ids)
    assert second.turn.prompt_ids[: len(shown)] == shown


async def test_the_longest_history_on_record_is_continued():
    talk = conversation(Policy("ok"))
    first = await exchange(talk, HI)
    second = await exchange(talk, HI, first.reply.message, MORE)
    third = await exchange(talk, HI, first.reply.message, MORE, second.reply.message, MORE)
    shown = (*second.turn.prompt_ids, *second.turn.completion.token_ids)
    assert third.turn.prompt_ids[: len(shown)] == shown


async def test_the_history_after_a_known_exchange_may_hold_words_of_another():
    talk = conversation(Policy("ok"))
    first = await exchange(talk, HI)
    late = await exchange(talk, HI, first.reply.message, MORE, say("assistant", "made up"), MORE)
    assert late.turn.prompt_ids[: len(first.turn.prompt_ids) + 3] == (
        *first.turn.prompt_ids,
        *first.turn.completion.token_ids,
    )
    assert "made up" in RENDERER.decode(late.turn.prompt_ids)


async def test_of_equal_exchanges_the_latest_is_continued():
    talk = conversation(Policy("ok"))
    first = await exchange(talk, HI)
    again = await exchange(talk, HI)
    await exchange(talk, HI, first.reply.message, MORE)
    assert first.turn.reply == ()
    assert again.turn.reply == (MORE,)
    assert len(rows(talk)) == 2


async def test_an_answer_that_was_not_recorded_is_unknown():
    talk = conversation(Policy("ok"), max_turns=1)
    lost = await exchange(talk, HI, record=False)
    found = await exchange(talk, HI, lost.reply.message, MORE)
    assert found.turn.prompt_ids == RENDERER.start((HI, lost.reply.message, MORE))
    assert len(talk.turns) == 1


async def test_a_stop_string_of_the_agent_is_cut_from_the_words_and_not_from_the_tokens():
    policy = Policy("go Obs: x")
    talk = conversation(policy)
    first = await exchange(talk, HI, stop=("Obs:", "never"))
    assert first.reply.content == "go "
    assert first.turn.text == "go Obs: x"
    assert policy.requests[0].sampling.stop == ("STOP", "Obs:", "never")
    second = await exchange(talk, HI, first.reply.message, MORE)
    assert "go Obs: x" in RENDERER.decode(second.turn.prompt_ids)


async def test_sampling_is_the_runs_and_each_request_has_its_own_id_and_seed():
    policy = Policy("ok")
    talk = conversation(policy)
    await exchange(talk, HI, max_tokens=9)
    await exchange(talk, HI, max_tokens=1000)
    await exchange(talk, HI)
    samplings = [request.sampling for request in policy.requests]
    assert [request.id for request in policy.requests] == ["3.1.0", "3.1.1", "3.1.2"]
    assert [sampling.seed for sampling in samplings] == [stable_seed(5, number) for number in range(3)]
    assert [sampling.max_tokens for sampling in samplings] == [9, 64, 64]
    assert {(sampling.temperature, sampling.top_p) for sampling in samplings} == {(0.7, 0.9)}
    assert set(RENDERER.stop_token_ids) <= set(samplings[0].stop_token_ids)


async def test_a_request_beyond_the_turns_is_refused_and_is_the_episodes_limit():
    talk = conversation(Policy("ok"), max_turns=2)
    await exchange(talk, HI)
    await exchange(talk, HI)
    assert talk.limit == ""
    with pytest.raises(RequestRefused, match="not done after 2 turns") as refused:
        await exchange(talk, HI)
    assert (refused.value.status, talk.limit) == (409, "the agent was not done after 2 turns")


async def test_requests_under_way_hold_their_turns():
    talk = conversation(Policy("ok"), max_turns=1)
    with talk.admit(ChatRequest(messages=(HI,))), pytest.raises(RequestRefused, match="not done after 1 turns"):
        await exchange(talk, HI)
    await exchange(talk, HI)


async def test_a_runaway_of_requests_is_refused_for_the_moment():
    gate = asyncio.Event()
    talk = conversation(Policy("ok", gate=gate), max_turns=100)
    tasks = [asyncio.create_task(exchange(talk, HI)) for _ in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as refused:
        await exchange(talk, HI)
    assert refused.value.status == 429
    gate.set()
    await asyncio.gather(*tasks)
    await exchange(talk, HI)
    assert [turn.completion.token_ids for turn in talk.turns] == [talk.turns[0].completion.token_ids] * 17


async def test_turns_are_in_the_order_of_asking():
    slow, fast = asyncio.Event(), asyncio.Event()
    policy = Policy("ok", gate=slow)
    talk = conversation(policy)
    first = asyncio.create_task(exchange(talk, HI))
    await asyncio.sleep(0)
    policy.gate = fast
    fast.set()
    second = await exchange(talk, MORE)
    slow.set()
    assert talk.turns == (second.turn,)
    assert [turn.prompt_ids for turn in ((await first).turn, second.turn)] == [turn.prompt_ids for turn in talk.turns]


async def test_the_context_cuts_completions_and_then_refuses_until_the_agent_sends_less():
    policy = Policy("x" * 10, finish=FinishReason.LENGTH)
    prompt_tokens = len(RENDERER.start((HI,)))
    talk = conversation(policy, max_total_tokens=prompt_tokens + 10)
    first = await exchange(talk, HI)
    assert policy.requests[0].sampling.max_tokens == 10
    assert first.is_cut
    with pytest.raises(RequestRefused, match="leave no room within") as refused:
        await exchange(talk, HI, first.reply.message, MORE)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert "no room" in talk.limit
    await exchange(talk, HI)
    assert talk.limit == "", "an agent that shortens its history is not truncated"


async def test_a_prompt_that_the_engine_can_never_take_is_refused():
    talk = conversation(Policy(error=ValueError("request 3.1.0 has a prompt of 9 tokens")))
    with pytest.raises(RequestRefused, match="has a prompt of 9") as refused:
        await exchange(talk, HI)
    assert refused.value.status == 400
    assert talk.limit.startswith("request 3.1.0")


async def test_a_request_that_the_engine_aborted_is_no_turn():
    talk = conversation(Policy("ok", finish=FinishReason.ABORT))
    with pytest.raises(RequestRefused) as refused:
        await exchange(talk, HI)
    assert (refused.value.status, talk.is_aborted, talk.turns) == (503, True, ())


async def test_only_a_limit_of_the_run_counts_as_a_cut():
    talk = conversation(Policy("x" * 100, finish=FinishReason.LENGTH))
    assert (await exchange(talk, HI)).is_cut
    assert (await exchange(talk, HI, max_tokens=99)).is_cut
    assert not (await exchange(talk, HI, max_tokens=64)).is_cut
    assert not (await exchange(talk, HI, max_tokens=3)).is_cut


async def test_cancelling_an_answer_cancels_the_generation_and_gives_the_turn_back():
    policy = Policy("ok", gate=asyncio.Event())
    talk = conversation(policy, max_turns=1)
    task = asyncio.create_task(exchange(talk, HI))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (policy.cancelled, talk.turns) == (["3.1.0"], ())
    policy.gate = None
    await exchange(talk, HI)
    assert policy.requests[-1].id == "3.1.1"


MOVE = st.tuples(st.sampled_from(["new", "go on", "edit"]), st.integers(0, 9), st.sampled_from("abc"))


@settings(max_examples=40)
@given(st.lists(MOVE, min_size=1, max_size=8))
def test_whatever_an_agent_does_each_sampled_token_is_learned_from_once_as_sampled(moves):
    async def run():
        talk = conversation(Policy("ok"), max_turns=99, sampling=SamplingParams(max_tokens=8))
        histories = []
        for kind, which, words in moves:
            start = ()
            if kind != "new" and histories:
                start = histories[which % len(histories)]
                if kind == "edit":
                    start = (*start[:-1], say("assistant", words))
            messages = (*start, say("user", words))
            histories.append((await exchange(talk, *messages)).history)
        return talk

    talk = asyncio.run(run())
    learned = [(row.ids[row.loss_mask], row.logp[row.loss_mask], row.turn[row.loss_mask]) for row in rows(talk)]
    ids, logp, turn = (np.concatenate(parts) for parts in zip(*learned, strict=True))
    sampled = [turn.completion for turn in talk.turns]
    assert list(ids) == [token for completion in sampled for token in completion.token_ids]
    assert list(logp) == [value for completion in sampled for value in completion.logprobs]
    assert list(turn) == [number for number, completion in enumerate(sampled) for _ in completion.token_ids]
