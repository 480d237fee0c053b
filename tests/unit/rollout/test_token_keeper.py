"""Episodes that are interrupted and played again: what was written is not drawn again, as far as the same was asked."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from reroll.observe.journal import Journal, SampleState, read_journal
from reroll.rollout.in_flight import TokenKeeper
from reroll.types import Completion, FinishReason, Request, SamplingParams, WrittenTokens


class Engine:
    """Writes the numbers after the last token of the prompt, one at a time, and tells of all but the last few."""

    def __init__(self, *, num_tokens=6, num_told=4, version=0):
        self.num_tokens, self.num_told, self.version = num_tokens, num_told, version
        self.asked = []
        self.num_written = 0
        self.dies = False

    async def generate(self, request, on_tokens):
        self.asked.append(request)
        written = request.written
        first, num_before = request.prompt_ids[-1] + 1, len(written.token_ids)
        ids = tuple(range(first, first + self.num_tokens))
        told = np.array(ids[num_before : self.num_told], dtype=np.uint32)
        if len(told):
            on_tokens(told, -0.5 * told, self.version)
        if self.dies:
            await asyncio.Event().wait()
        self.num_written += self.num_tokens - num_before
        return Completion(
            token_ids=ids,
            logprobs=tuple(-0.5 * id for id in ids),
            finish_reason=FinishReason.STOP,
            versions=(*written.versions, (self.version, self.num_tokens - num_before)),
        )


def ask(name, *prompt):
    return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=9))


async def interrupted(keeper, engine, request):
    engine.dies = True
    task = asyncio.create_task(keeper.generate(request))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.dies = False


async def test_a_request_that_was_cancelled_goes_on_after_the_last_token_that_was_told(journal):
    engine = Engine()
    keeper = TokenKeeper(journal, engine.generate)
    whole = await keeper.generate(ask("0.0.0", 10))
    engine.num_written = 0
    await interrupted(keeper, engine, ask("0.1.0", 10))
    assert await keeper.generate(ask("0.1.0", 10)) == replace(whole, versions=((0, 4), (0, 2)))
    assert engine.num_written == 2
    assert engine.asked[-1].written == WrittenTokens(
        token_ids=(11, 12, 13, 14), logprobs=(-5.5, -6.0, -6.5, -7.0), versions=((0, 4),)
    )
    assert len({request.id for request in engine.asked}) == 3  # What is on its way out is not taken for the next try.


async def test_an_episode_that_is_played_again_is_given_its_turns_and_goes_on_in_the_one_that_was_interrupted(tmp_path):
    engine = Engine()
    with Journal(tmp_path, config="c") as journal:
        keeper = TokenKeeper(journal, engine.generate)
        turns = [await keeper.generate(ask("0.0.0", 10)), await keeper.generate(ask("0.0.1", 10, 16, 20))]
        await interrupted(keeper, engine, ask("0.0.2", 10, 16, 20, 26, 30))
        journal.flush()
        later = Journal(tmp_path, config="c")
        later.resume(version=0, max_staleness=0)
        engine = Engine(version=1)
        keeper = TokenKeeper(later, engine.generate)
        assert [await keeper.generate(ask("0.0.0", 10)), await keeper.generate(ask("0.0.1", 10, 16, 20))] == turns
        assert engine.asked == []
        last = await keeper.generate(ask("0.0.2", 10, 16, 20, 26, 30))
    assert last.token_ids == tuple(range(31, 37))
    assert last.versions == ((0, 4), (1, 2))
    assert engine.num_written == 2


async def test_where_the_environment_says_something_else_the_rest_is_drawn_anew_and_the_journal_says_so(journal):
    engine = Engine()
    keeper = TokenKeeper(journal, engine.generate)
    await keeper.generate(ask("0.0.0", 10))
    await keeper.generate(ask("0.0.1", 10, 16, 20))
    engine.num_written = 0
    await keeper.generate(ask("0.0.0", 10))
    again = await keeper.generate(ask("0.0.1", 10, 16, 40))
    assert again.token_ids == tuple(range(41, 47))
    assert engine.num_written == 6
    journal.flush()
    [event] = [event for event in read_journal(journal.folder) if event.state is SampleState.GENERATING]
    assert (event.sample_id, event.detail["discarded"]) == ("0.0", 6)
    assert "told something else" in event.detail["reason"]


async def test_what_the_engine_aborted_is_not_taken_for_whole(journal):
    async def aborts(request, on_tokens):
        return Completion(token_ids=(11,), logprobs=(-1.0,), finish_reason=FinishReason.ABORT, versions=((0, 1),))

    keeper = TokenKeeper(journal, aborts)
    assert (await keeper.generate(ask("0.0.0", 10))).finish_reason is FinishReason.ABORT
    engine = Engine()
    keeper = TokenKeeper(journal, engine.generate)
    assert (await keeper.generate(ask("0.0.0", 10))).finish_reason is FinishReason.STOP
