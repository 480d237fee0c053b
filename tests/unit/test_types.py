"""The nouns."""

from __future__ import annotations

import copy
import pickle

import pytest

from reroll.testing import trajectory_of
from reroll.types import Group, Prompt, Request, SamplingParams, Score, Status, Trajectory, WrittenTokens

PROMPT = Prompt(id="p/0", messages=({"role": "user", "content": "hi"},), domain="p", answer="7", extra={"k": [1]})
SCORE = Score(value=1.0, parts={"a": 1.0}, weights={"a": 2.0}, info={"b": 3.0}, answer="7")
SAMPLING = SamplingParams(max_tokens=3)
NOUNS = [
    PROMPT,
    SCORE,
    SAMPLING,
    Request(
        id="r",
        prompt_ids=(1, 2),
        sampling=SAMPLING,
        written=WrittenTokens(token_ids=(7,), logprobs=(-0.5,), versions=((2, 1),)),
    ),
    Group(number=3, prompt=PROMPT, trajectories=(trajectory_of("one", "two").scored(SCORE),), version=1, baseline=0.5),
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_a_noun_comes_back_from_a_pickle_and_a_copy_as_it_was(noun: object) -> None:
    for twin in (pickle.loads(pickle.dumps(noun)), copy.copy(noun), copy.deepcopy(noun)):
        assert twin == noun
        assert type(twin) is type(noun)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.3, 0.1 + 0.2), False),  # Doubles that differ, and singles that do not.
        ((0.3, 0.3000001), True),
        ((1.0,), False),
    ],
)
def test_a_group_has_a_signal_where_its_rewards_differ_in_the_precision_of_advantages(
    rewards: tuple[float, ...], expected: bool
) -> None:
    trajectories = tuple(Trajectory(id="t", turns=(), status=Status.COMPLETED, reward=reward) for reward in rewards)
    group = Group(number=0, prompt=Prompt(id="p", messages=(), domain="d"), trajectories=trajectories, version=0)
    assert group.has_signal is expected


def test_a_text_makes_a_trajectory_by_its_old_name_too() -> None:
    from reroll.rewards.said import said

    assert said("one, two", "three") == trajectory_of("one, two", "three")
    assert [turn.text for turn in said("one, two", "three").turns] == ["one, two", "three"]
