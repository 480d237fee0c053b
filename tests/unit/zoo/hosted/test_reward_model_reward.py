"""A reward model as a reward: what is asked together is scored together, and each gets its own score."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from reroll.errors import WorkerDied
from reroll.types import Completion, FinishReason, Message, Prompt, Status, Trajectory, Turn
from reroll_zoo.reward_model.config import ModelRewardConfig
from reroll_zoo.reward_model.reward import Ids, RewardModel, ScoreModel

DONE = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))


def ask(text: str) -> list[Message]:
    return [Message(role="user", content="?"), Message(role="assistant", content=text)]


def render(messages: Sequence[Message]) -> Ids:
    """Every character of the last message is a token."""
    return tuple(map(ord, messages[-1]["content"]))


class Model:
    """Scores a row by its sum, and remembers how rows came together."""

    def __init__(self, *, delay_s: float = 0.001) -> None:
        self.batches: list[list[Ids]] = []
        self._delay_s = delay_s

    async def __call__(self, rows: Sequence[Ids]) -> list[float]:
        self.batches.append(list(rows))
        await asyncio.sleep(self._delay_s)
        if (ord("!"),) in rows:
            raise WorkerDied("the worker is gone")
        return [float(sum(row)) for row in rows]


def scores(model: Model, *, max_batch_tokens: int = 1000) -> ScoreModel:
    return ScoreModel(render, model, max_batch_tokens=max_batch_tokens)


async def test_what_is_asked_together_is_scored_together() -> None:
    model = Model()
    it = scores(model)
    texts = [f"answer {number}" for number in range(20)]
    given = await asyncio.gather(*(it(ask(text), max_tokens=100) for text in texts))
    assert given == [sum(map(ord, text)) for text in texts]
    assert len(model.batches) == 1


async def test_a_batch_holds_no_more_tokens_than_allowed_but_always_a_row() -> None:
    model = Model()
    it = scores(model, max_batch_tokens=10)
    texts = ["abcde", "fghij", "k", "a row of its own that is long", "l"]
    given = await asyncio.gather(*(it(ask(text), max_tokens=100) for text in texts))
    assert given == [sum(map(ord, text)) for text in texts]
    assert [len(batch) for batch in model.batches] == [2, 1, 1, 1]


async def test_a_batch_gathers_while_another_is_computed() -> None:
    model = Model(delay_s=0.05)
    it = scores(model)
    first = asyncio.create_task(it(ask("a"), max_tokens=9))
    await asyncio.sleep(0.02)
    late = [asyncio.create_task(it(ask(text), max_tokens=9)) for text in "bcd"]
    assert await asyncio.gather(first, *late) == [97, 98, 99, 100]
    assert [len(batch) for batch in model.batches] == [1, 3]


async def test_a_longer_conversation_is_cut_at_its_end() -> None:
    assert await scores(Model())(ask("abc"), max_tokens=2) == ord("a") + ord("b")


async def test_one_who_gives_up_harms_nobody_who_waits_for_the_same_score() -> None:
    it = scores(Model())
    tasks = [asyncio.create_task(it(ask(text), max_tokens=9)) for text in "aab"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [97, 98]


async def test_equal_conversations_get_equal_scores_and_are_scored_once() -> None:
    model = Model()
    it = scores(model)
    assert await asyncio.gather(*(it(ask("same"), max_tokens=9) for _ in range(8))) == [sum(map(ord, "same"))] * 8
    await it(ask("same"), max_tokens=9)
    assert model.batches == [[tuple(map(ord, "same"))]]


async def test_only_so_many_scores_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll_zoo.reward_model.reward._MAX_REMEMBERED", 2)
    model = Model()
    it = scores(model)
    for text in "abcca":
        assert await it(ask(text), max_tokens=9) == ord(text)
    assert [batch[0][0] for batch in model.batches] == [97, 98, 99, 97]


async def test_a_model_that_fails_fails_all_who_wait_for_it_and_nobody_after() -> None:
    it = scores(Model())
    failed = await asyncio.gather(*(it(ask(text), max_tokens=9) for text in "a!"), return_exceptions=True)
    assert [type(error) for error in failed] == [WorkerDied, WorkerDied]
    assert await it(ask("a"), max_tokens=9) == 97


async def test_closing_gives_up_what_waits() -> None:
    it = scores(Model(delay_s=60))
    tasks = [asyncio.create_task(it(ask("a"), max_tokens=9))]
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(it(ask("b"), max_tokens=9)))
    await asyncio.sleep(0)
    await it.close()
    await it.close()
    done, waiting = await asyncio.wait(tasks, timeout=30)
    assert not waiting
    assert all(task.cancelled() for task in done)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 97.0),
        ({"output": "sigmoid"}, 1.0),
        ({"scale": -0.1}, -9.7),
        ({"clip": [-5, 5]}, 5.0),
        ({"output": "sigmoid", "scale": 2.0, "clip": [0, 1.5]}, 1.5),
    ],
)
async def test_the_heads_number_is_squashed_scaled_and_clipped_in_this_order(options: dict[str, Any], value: float) -> None:
    config = ModelRewardConfig.model_validate({"kind": "reward_model", "model": "m"} | options)
    trajectory = Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=DONE, text="a"),), status=Status.COMPLETED)
    prompt = Prompt(id="p", messages=(Message(role="user", content="?"),), domain="d")
    assert (await RewardModel(config, scores(Model()))(prompt, trajectory)).value == pytest.approx(value)


@pytest.mark.parametrize("raw", [-1000.0, -2.0, 0.0, 2.0, 1000.0])
async def test_a_sigmoid_takes_any_number(raw: float) -> None:
    async def constant(rows: Sequence[Ids]) -> list[float]:
        return [raw]

    config = ModelRewardConfig.model_validate({"kind": "reward_model", "model": "m", "output": "sigmoid"})
    trajectory = Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=DONE, text="a"),), status=Status.COMPLETED)
    it = RewardModel(config, ScoreModel(render, constant, max_batch_tokens=9))
    value = (await it(Prompt(id="p", messages=(), domain="d"), trajectory)).value
    assert value == pytest.approx(0.5 * (1 + math.tanh(raw / 2)))


async def test_the_whole_episode_is_scored() -> None:
    seen: list[Message] = []

    def look(messages: Sequence[Message]) -> Ids:
        seen.extend(messages)
        return (1,)

    turns = (
        Turn(prompt_ids=(0,), completion=DONE, text="north", shown=(Message(role="user", content="start"),)),
        Turn(prompt_ids=(0,), completion=DONE, text="south", shown=(Message(role="user", content="a wall"),), reply=()),
    )
    config = ModelRewardConfig.model_validate({"kind": "reward_model", "model": "m"})
    it = RewardModel(config, ScoreModel(look, Model(), max_batch_tokens=9))
    await it(Prompt(id="p", messages=(), domain="d"), Trajectory(id="s", turns=turns, status=Status.COMPLETED))
    assert [message["content"] for message in seen] == ["start", "north", "a wall", "south"]
    assert [message["role"] for message in seen] == ["user", "assistant", "user", "assistant"]
