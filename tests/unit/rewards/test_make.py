"""Every reward node is made into something that judges."""

from __future__ import annotations

import pytest

from reroll.config.reward_base import InProcessRewardConfig, RewardConfig
from reroll.config.rewards import needs_process
from reroll.errors import RewardError
from reroll.rewards.base import Inline, ask
from reroll.testing import trajectory_of
from reroll.types import Prompt, Score, Trajectory

NODES = RewardConfig.kinds()


@pytest.mark.parametrize("kind", NODES)
def test_what_runs_in_a_process_has_limits(kind: str) -> None:
    node = NODES[kind]
    assert issubclass(node, InProcessRewardConfig) or not node.in_process


@pytest.mark.parametrize("kind", NODES)
def test_every_kind_has_a_weight_and_says_what_it_is(kind: str) -> None:
    assert NODES[kind].model_fields["weight"].default == 1.0
    assert NODES[kind].__doc__


def test_where_a_kind_runs_depends_on_its_pattern_alone() -> None:
    exact = NODES["exact"]
    assert not needs_process(exact(kind="exact"))
    assert needs_process(exact(kind="exact", pattern="a+"))  # type: ignore[call-arg]


async def test_a_verifier_that_raises_in_place_fails_its_sample_with_the_place() -> None:
    def broken(prompt: Prompt, trajectory: Trajectory) -> Score:
        raise ZeroDivisionError("an odd row")

    with pytest.raises(RewardError, match=r"ZeroDivisionError: an odd row \(.*test_make.py:\d+\)"):
        await ask(Inline(broken), Prompt(id="p", messages=(), domain="d"), trajectory_of("x"))


async def test_a_verifier_may_be_async() -> None:
    async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=0.5)

    assert (await ask(Inline(slow), Prompt(id="p", messages=(), domain="d"), trajectory_of("x"))).value == 0.5
