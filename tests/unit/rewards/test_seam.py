"""No text of a policy ends a run: whatever a reward raises fails one sample, is told once and counted."""

from __future__ import annotations

import copy
import logging
import pickle
from contextlib import suppress

import pytest
from pydantic import TypeAdapter

from reroll.config.reward_base import RewardConfig
from reroll.errors import RewardError, RewardRaised
from reroll.rewards.base import Reward
from reroll.rewards.cluster import RewardCluster
from reroll.rewards.meter import RewardMeter
from reroll.testing import trajectory_of
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.combined.rewards import Cascade, Stack

PROMPT = Prompt(id="p/0", messages=(), domain="p", answer="7")


class Fragile:
    """Cannot bear some texts, and is wrong in every way that a reward can be."""

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        match trajectory.text:
            case "digits":
                raise ValueError(str(10**4000))
            case "deep":
                raise RecursionError
            case "memory":
                raise MemoryError
            case "group":
                raise ExceptionGroup("several", [KeyError("a"), KeyError("b")])
            case "nan":
                return Score(value=float("nan"))
            case "nothing":
                return None  # type: ignore[return-value]
        return Score(value=1.0)


def node(**fields: object) -> RewardConfig:
    return TypeAdapter[RewardConfig](RewardConfig).validate_python(fields)


def cluster(reward: Reward) -> RewardCluster:
    return RewardCluster({"p": reward}, {"p": reward}, RewardMeter())


MADE: dict[str, Reward] = {
    "alone": Fragile(),
    "stack": Stack(node(kind="stack", parts={"a": {"kind": "exact"}}), [Fragile()]),  # type: ignore[arg-type]
    "cascade": Cascade(node(kind="cascade", steps=[{"kind": "exact"}] * 2), [Fragile(), Fragile()]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("text", ["digits", "deep", "memory", "group", "nan", "nothing"])
async def test_whatever_a_reward_raises_or_returns_fails_that_sample_alone(kind: str, text: str) -> None:
    rewards = cluster(MADE[kind])
    with pytest.raises(RewardError) as caught:
        await rewards.score(PROMPT, trajectory_of(text))
    assert 0 < len(str(caught.value)) < 3000
    assert (await rewards.score(PROMPT, trajectory_of("fine"))).value == 1.0


async def test_what_is_raised_is_logged_once_a_kind_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rewards = cluster(MADE["stack"])
    with caplog.at_level(logging.WARNING):
        for text in ("digits", "digits", "deep", "digits", "nan", "fine"):
            with suppress(RewardError):
                await rewards.score(PROMPT, trajectory_of(text))
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "the reward of domain p raised, and the sample fails"
    ] * 2
    assert "a: ValueError: 1000" in caplog.records[0].getMessage()
    assert "a: RecursionError" in caplog.records[1].getMessage()
    stats = rewards.stats().values_by_name()
    assert [stats[f"judging/p/{name}"] for name in ("scored", "failed", "raised")] == [1, 5, 4]


STEERING = "\x1b]0;mine\x07\x1b[2J \x9b31m \r \ud800"
"""What sets a terminal's title, clears it, colours it, starts the line anew; and half a character, which no file takes."""


@pytest.mark.parametrize("raised", [ValueError, RewardError, KeyError])
async def test_words_of_the_policy_in_a_reason_steer_no_terminal(
    raised: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def quotes(prompt: Prompt, trajectory: Trajectory) -> float:
        raise raised(f"cannot read {trajectory.text}")

    with caplog.at_level(logging.WARNING), pytest.raises(RewardError) as caught:
        await cluster(quotes).score(PROMPT, trajectory_of(STEERING))
    told = [
        str(caught.value),
        f"{pickle.loads(pickle.dumps(caught.value))}",
        *(record.getMessage() for record in caplog.records),
    ]
    for reason in told:
        assert "cannot read" in reason
        assert reason.isprintable()
        reason.encode()


def test_why_a_reward_raised_travels_between_processes_whole() -> None:
    error = RewardRaised("ValueError: x", kind="ValueError (a.py:3)")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), str(twin), twin.kind) == (RewardRaised, "ValueError: x", "ValueError (a.py:3)")
