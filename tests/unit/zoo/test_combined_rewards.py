"""Rewards made of rewards."""

from __future__ import annotations

import asyncio
import re

import pytest
from pydantic import TypeAdapter

from reroll.config.reward_base import RewardConfig
from reroll.config.rewards import needs_process, walk
from reroll.errors import RewardError, RewardRaised
from reroll.rewards.base import Reward
from reroll.rewards.make import RewardBuilder
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.combined.rewards import Cascade, Stack

PROMPT = Prompt(id="p/0", messages=(), domain="p", answer="7")


def config(**fields: object) -> RewardConfig:
    return TypeAdapter[RewardConfig](RewardConfig).validate_python(fields)


def said(*texts: str, reward: float = 0.0) -> Trajectory:
    completion = Completion(token_ids=(1, 2), logprobs=(0.0, 0.0), finish_reason=FinishReason.STOP, versions=((0, 2),))
    turns = tuple(Turn(prompt_ids=(0,), completion=completion, text=text) for text in texts)
    return Trajectory(id="s", turns=turns, status=Status.COMPLETED, reward=reward)


def made(node: RewardConfig) -> Reward:
    return RewardBuilder().build({"p": node})["p"]


class Always:
    """Gives the same score, later if asked to, and counts its calls."""

    def __init__(self, score: Score | RewardError, *, delay_s: float = 0.0) -> None:
        self.score, self.delay_s, self.num_calls, self.was_cancelled = score, delay_s, 0, False

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        self.num_calls += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(self.score, RewardError):
            raise self.score
        return self.score


PARTS = {"answer": {"kind": "numeric"}, "short": {"kind": "overlong", "max_tokens": 4, "buffer_tokens": 4, "weight": 0.5}}


async def test_a_stack_is_the_weighted_sum_of_its_parts_each_known_by_name() -> None:
    score = await made(config(kind="stack", parts=PARTS))(PROMPT, said("7"))
    assert score == Score(value=0.75, parts={"answer": 1.0, "short": -0.5}, weights={"answer": 1.0, "short": 0.5}, answer="7")


async def test_the_sum_is_clipped_and_the_parts_are_not() -> None:
    score = await made(config(kind="stack", parts=PARTS, clip=[0.0, 0.5]))(PROMPT, said("7"))
    assert (score.value, score.parts) == (0.5, {"answer": 1.0, "short": -0.5})
    score = await made(config(kind="stack", parts=PARTS, clip=[0.0, 0.5]))(PROMPT, said("8", "8"))
    assert (score.value, score.parts["short"]) == (0.0, -1.0)


async def test_parts_of_parts_are_told_behind_a_dot_and_are_no_parts_of_the_whole() -> None:
    inner = {"kind": "stack", "parts": PARTS, "weight": 2.0}
    score = await made(config(kind="stack", parts={"all": inner, "again": {"kind": "exact"}}))(PROMPT, said("7"))
    assert score.value == 2 * 0.75 + 1.0
    assert score.parts == {"all": 0.75, "again": 1.0}
    assert score.weights == {"all": 2.0, "again": 1.0}
    assert score.info == {"all.answer": 1.0, "all.short": -0.5}


async def test_parts_judge_at_the_same_time_and_one_that_fails_stops_the_others() -> None:
    node = config(kind="stack", parts={"good": {"kind": "exact"}, "bad": {"kind": "exact"}})
    slow, broken = Always(Score(value=1.0), delay_s=60.0), Always(RewardError("it is down"))
    with pytest.raises(RewardError, match="bad: it is down"):
        await asyncio.wait_for(Stack(node, [slow, broken])(PROMPT, said("7")), 50)
    assert slow.was_cancelled


class Buggy:
    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        raise ZeroDivisionError("a bug")


async def test_what_a_part_raises_fails_the_sample_with_the_parts_name_and_the_place() -> None:
    with pytest.raises(RewardRaised, match=r"a: ZeroDivisionError: a bug \(.*test_combined_rewards.py:\d+\)") as caught:
        await Stack(config(kind="stack", parts={"a": {"kind": "exact"}}), [Buggy()])(PROMPT, said("7"))
    assert re.fullmatch(r"ZeroDivisionError \(.*test_combined_rewards.py:\d+\)", caught.value.kind)


async def test_a_cascade_goes_on_where_a_step_raised() -> None:
    node = config(kind="cascade", steps=[{"kind": "exact"}, {"kind": "exact"}])
    assert (await Cascade(node, [Buggy(), Always(Score(value=0.7))])(PROMPT, said("7"))).value == 0.7


async def test_a_cascade_asks_the_next_only_about_what_did_not_pass() -> None:
    node = config(kind="cascade", steps=[{"kind": "exact"}, {"kind": "exact"}], threshold=0.5)
    rule, judge = Always(Score(value=0.5, parts={"format": 1.0})), Always(Score(value=0.2))
    score = await Cascade(node, [rule, judge])(PROMPT, said("7"))
    assert score == Score(value=0.5, info={"step_0": 0.5, "step_0.format": 1.0, "decided_by": 0.0})
    assert judge.num_calls == 0
    score = await Cascade(node, [Always(Score(value=0.4)), judge])(PROMPT, said("7"))
    assert score == Score(value=0.2, info={"step_0": 0.4, "step_1": 0.2, "decided_by": 1.0})


async def test_a_cascade_goes_on_where_a_step_could_not_judge_and_fails_with_its_last() -> None:
    node = config(kind="cascade", steps=[{"kind": "exact"}, {"kind": "exact"}])
    broken, judge = Always(RewardError("no reference")), Always(Score(value=0.7))
    score = await Cascade(node, [broken, judge])(PROMPT, said("7"))
    assert score == Score(value=0.7, info={"step_1": 0.7, "decided_by": 1.0})
    with pytest.raises(RewardError, match="step 1: no reference"):
        await Cascade(node, [judge, broken])(PROMPT, said("7"))


async def test_what_an_episode_earned_can_be_a_part() -> None:
    node = config(kind="stack", parts={"game": {"kind": "env_reward"}, "answer": {"kind": "numeric", "weight": 0.1}})
    score = await made(node)(PROMPT, said("left", "7", reward=2.0))
    assert (score.value, score.parts, score.answer) == (2.1, {"game": 2.0, "answer": 1.0}, "7")


async def test_the_final_answer_is_that_of_the_first_part_and_of_the_last_step_that_read_one() -> None:
    first, second, blind = Always(Score(value=0.0, answer="1")), Always(Score(value=0.0, answer="2")), Always(Score(value=0.0))
    stack = config(kind="stack", parts={"a": {"kind": "exact"}, "b": {"kind": "exact"}, "c": {"kind": "exact"}})
    assert (await Stack(stack, [blind, first, second])(PROMPT, said("7"))).answer == "1"
    cascade = config(kind="cascade", steps=[{"kind": "exact"}] * 3)
    assert (await Cascade(cascade, [first, second, blind])(PROMPT, said("7"))).answer == "2"


def test_walking_gives_every_node_its_path() -> None:
    node = config(kind="stack", parts={"a": {"kind": "cascade", "steps": [{"kind": "exact"}, {"kind": "math"}]}})
    assert [(name, node.kind) for name, node in walk({"p": node})] == [
        ("p", "stack"),
        ("p.parts.a", "cascade"),
        ("p.parts.a.steps.0", "exact"),
        ("p.parts.a.steps.1", "math"),
    ]


def test_cheap_kinds_run_in_place_unless_they_search_by_a_pattern() -> None:
    assert not needs_process(config(kind="exact"))
    assert needs_process(config(kind="exact", pattern="(a+)+$"))
    assert needs_process(config(kind="math"))
