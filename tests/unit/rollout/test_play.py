import asyncio
from dataclasses import dataclass, field

import pytest

from reroll.envs.base import StepResult
from reroll.errors import EnvError
from reroll.rollout.play import SingleTurn, play, stable_seed
from reroll.tokens.renderer import Renderer
from reroll.types import Completion, FinishReason, Prompt, SamplingParams, Status
from reroll_zoo.tiny_models import tiny_tokenizer

PROMPT = Prompt(id="p/0", messages=({"role": "user", "content": "abc"},), domain="d")
SAMPLING = SamplingParams(max_tokens=4, seed=5, stop_token_ids=(9,))


class Letters:
    """A renderer of one id per character: enough to see what is shown to the engine."""

    stop_token_ids = (0, 9)

    def kept(self, messages):
        return messages

    def start(self, messages):
        return tuple(ord(char) for message in messages for char in message["content"])

    def extend(self, prompt_ids, completion_ids, messages):
        return (*prompt_ids, *completion_ids, *self.start(messages))

    def decode(self, ids):
        return "".join(chr(id) for id in ids if id not in self.stop_token_ids)


@dataclass
class Engine:
    """Says the same each time, and remembers what it was asked."""

    text: str = "ok"
    finish_reason: FinishReason = FinishReason.STOP
    requests: list = field(default_factory=list)

    async def __call__(self, request):
        self.requests.append(request)
        ids = tuple(map(ord, self.text)) + ((0,) if self.finish_reason is FinishReason.STOP else ())
        return Completion(
            token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=self.finish_reason, versions=((0, len(ids)),)
        )


class Chat:
    """Answers each action with its number until told to end."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.actions = []
        self.closed = 0

    async def reset(self):
        return PROMPT.messages

    async def step(self, action):
        self.actions.append(action)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self):
        self.closed += 1


def reply(text, reward=0.0):
    return StepResult(messages=({"role": "user", "content": text},), reward=reward)


END = StepResult(terminated=True, reward=1.0)


async def run(env, engine, *, sampling=SAMPLING, **limits):
    limits = {"max_prompt_tokens": 10, "max_turns": 5, **limits}
    return await play(env, engine, Letters(), sampling, id="3.1", **limits)


async def test_a_single_turn_episode_ends_at_once():
    engine = Engine()
    result = await run(SingleTurn(PROMPT), engine)
    assert (result.id, result.status, result.reason, result.text) == ("3.1", Status.COMPLETED, "", "ok")
    (turn,) = result.turns
    assert turn.prompt_ids == tuple(b"abc")
    assert turn.completion.token_ids == (*b"ok", 0)


async def test_a_later_prompt_extends_the_tokens_that_were_sampled():
    engine = Engine()
    env = Chat(reply("x", reward=0.5), END)
    result = await run(env, engine)
    assert engine.requests[1].prompt_ids == (*b"abcok", 0, *b"x")
    assert env.actions == ["ok", "ok"]
    assert result.status is Status.COMPLETED
    assert [turn.reward for turn in result.turns] == [0.5, 1.0]
    assert result.turns[0].reply == ({"role": "user", "content": "x"},)
    assert result.reward == 1.5
    assert env.closed == 1


async def test_each_turn_has_its_own_id_and_stable_seed():
    engine = Engine()
    await run(Chat(reply("x"), END), engine)
    assert [request.id for request in engine.requests] == ["3.1.0", "3.1.1"]
    assert [request.sampling.seed for request in engine.requests] == [stable_seed(5, 0), stable_seed(5, 1)]


async def test_the_stop_tokens_of_the_template_are_added_to_those_asked_for():
    engine = Engine()
    await run(SingleTurn(PROMPT), engine)
    assert engine.requests[0].sampling.stop_token_ids == (9, 0)


async def test_a_prompt_that_is_too_long_fails_and_names_the_setting():
    engine = Engine()
    result = await run(SingleTurn(PROMPT), engine, max_prompt_tokens=2)
    assert result.status is Status.FAILED
    assert "more than 2 tokens: raise rollout.max_prompt_tokens" in result.reason
    assert engine.requests == []


async def test_a_single_answer_cut_by_its_limit_is_truncated():
    result = await run(SingleTurn(PROMPT), Engine(finish_reason=FinishReason.LENGTH))
    assert (result.status, result.text) == (Status.TRUNCATED, "ok")
    assert "rollout.max_tokens" in result.reason
    assert result.is_usable


async def test_a_turn_cut_by_its_limit_is_played_as_it_is_and_the_game_goes_on():
    env = Chat(reply("what?", reward=-0.5), END)
    result = await run(env, Engine(finish_reason=FinishReason.LENGTH))
    assert env.actions == ["ok", "ok"]
    assert (result.status, result.reward) == (Status.TRUNCATED, 0.5)


async def test_a_request_that_the_engine_aborted_is_not_usable():
    result = await run(SingleTurn(PROMPT), Engine(finish_reason=FinishReason.ABORT))
    assert result.status is Status.ABORTED
    assert not result.is_usable


async def test_an_episode_that_does_not_end_is_truncated_after_its_turns():
    result = await run(Chat(reply("x"), reply("y"), reply("z")), Engine(), max_turns=2)
    assert (result.status, len(result.turns)) == (Status.TRUNCATED, 2)
    assert "after 2 turns" in result.reason


async def test_a_limit_of_the_environment_truncates():
    result = await run(Chat(StepResult(truncated=True)), Engine())
    assert result.status is Status.TRUNCATED


async def test_the_context_limit_shortens_completions_and_then_truncates():
    engine = Engine()
    result = await run(Chat(reply("x"), reply("y"), END), engine, max_total_tokens=9)
    assert [request.sampling.max_tokens for request in engine.requests] == [4, 2]
    assert result.status is Status.TRUNCATED
    assert "within 9 tokens of context" in result.reason


async def test_an_environment_that_fails_half_way_fails_the_sample_and_keeps_its_turns():
    env = Chat(reply("x"), EnvError("the game crashed"))
    result = await run(env, Engine())
    assert (result.status, result.reason, len(result.turns)) == (Status.FAILED, "the game crashed", 2)
    assert env.closed == 1


async def test_an_environment_that_cannot_start_fails_the_sample():
    class Broken(Chat):
        async def reset(self):
            raise EnvError("no display")

    env = Broken()
    result = await run(env, Engine())
    assert (result.status, result.reason, result.turns) == (Status.FAILED, "no display", ())
    assert env.closed == 1


async def test_cancellation_goes_on_after_the_environment_is_closed():
    async def engine(request):
        await asyncio.Event().wait()

    env = Chat()
    task = asyncio.create_task(run(env, engine))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1


async def test_an_environment_that_does_not_close_spoils_neither_sample_nor_cancellation(caplog):
    class Sticky(Chat):
        async def close(self):
            raise EnvError("still there")

    assert (await run(Sticky(END), Engine())).status is Status.COMPLETED
    assert "still there" in caplog.text

    async def engine(request):
        await asyncio.Event().wait()

    task = asyncio.create_task(run(Sticky(), engine))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_with_a_chat_template_sampled_tokens_stay_as_they_were_sampled():
    renderer = Renderer(tiny_tokenizer())
    requests = []

    async def engine(request):
        requests.append(request)
        ids = (*request.prompt_ids[2:4], renderer.stop_token_ids[-1])
        return Completion(
            token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=FinishReason.STOP, versions=((0, len(ids)),)
        )

    result = await play(Chat(reply("x"), END), engine, renderer, SAMPLING, id="0.0", max_prompt_tokens=50, max_turns=2)
    first, second = result.turns
    shown = (*first.prompt_ids, *first.completion.token_ids)
    assert second.prompt_ids[: len(shown)] == shown
    assert requests[1].prompt_ids == second.prompt_ids
    assert set(renderer.stop_token_ids) <= set(requests[0].sampling.stop_token_ids)


async def test_a_bug_is_raised_and_not_made_a_status():
    env = Chat(KeyError("bug"))
    with pytest.raises(KeyError):
        await run(env, Engine())
    assert env.closed == 1


def test_seeds_are_the_same_in_every_process_and_differ_by_every_part():
    assert stable_seed(1, 2, 3) == 1517167407554927345
    seeds = {stable_seed(run, ticket, sibling) for run in range(10) for ticket in range(100) for sibling in range(16)}
    assert len(seeds) == 10 * 100 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stable_seed(1, 23) != stable_seed(12, 3)


async def test_a_history_window_shows_the_opening_and_the_last_exchanges(monkeypatch):
    engine = Engine()
    env = Chat(reply("1"), reply("2"), reply("3"), END)
    result = await run(env, engine, history=1, max_prompt_tokens=100)
    shown = ["".join(map(chr, request.prompt_ids)) for request in engine.requests]
    assert shown == ["abc", "abcok\x001", "abcok2", "abcok3"]
    assert result.status is Status.COMPLETED


async def test_what_the_environment_measured_and_where_it_stood_is_kept_with_each_turn():
    first = StepResult(messages=({"role": "user", "content": "1"},), info={"effective": 1.0}, state="s1")
    result = await run(Chat(first, StepResult(terminated=True, info={"success": 1.0})), Engine())
    assert [(turn.state, dict(turn.info)) for turn in result.turns] == [(None, {"effective": 1.0}), ("s1", {"success": 1.0})]
