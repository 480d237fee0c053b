"""What of a reward is trained on: its parts by their weights, and nothing that is only told beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter

from reroll.algo.advantages import normalised
from reroll.config.reward_base import InProcessRewardConfig, RewardConfig
from reroll.config.rewards import RewardWorkersConfig
from reroll.errors import RewardError
from reroll.rewards.base import Reward, as_score
from reroll.rewards.meter import RewardMeter
from reroll.rewards.workers import RewardWorkers
from reroll.runtime.local import LocalRuntime
from reroll.testing import trajectory_of
from reroll.tokens.samples import rows_of
from reroll.types import Group, Prompt, Score, Trajectory
from reroll_zoo.algorithms.advantages import gdpo
from reroll_zoo.combined.rewards import Cascade, Stack
from reroll_zoo.text.match import RegexRewardConfig

PROMPT = Prompt(id="p/0", messages=(), domain="p", answer="7")
RIGHT = (1.0, 1.0, 0.0, 0.0)
"""Of four siblings."""


class Told:
    """Gives each sibling the score that is written down for it; its text says which it is."""

    def __init__(self, *scores: Score | float) -> None:
        self._scores = [score if isinstance(score, Score) else Score(value=score) for score in scores]

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        return self._scores[int(trajectory.text)]


def node(**fields: Any) -> Any:
    return TypeAdapter[RewardConfig](RewardConfig).validate_python(fields)


def stack(parts: Mapping[str, Reward], **weights: float) -> Stack:
    config = node(kind="stack", parts={name: {"kind": "exact", "weight": weights.get(name, 1.0)} for name in parts})
    return Stack(config, list(parts.values()))


def advantages(reward: Reward, *, grpo: bool = False) -> NDArray[np.float64]:
    """What each of the four siblings is trained with."""

    async def judged() -> list[Trajectory]:
        return [trajectory_of(str(place)).scored(await reward(PROMPT, trajectory_of(str(place)))) for place in range(4)]

    group = Group(number=0, prompt=PROMPT, trajectories=tuple(asyncio.run(judged())), version=0)
    episodes = rows_of([group]).episodes
    per_token = (
        normalised(episodes, mean="group", std="group", epsilon=1e-6) if grpo else gdpo(episodes, weights={}, epsilon=1e-6)
    )
    return per_token[episodes.written].double().numpy()


def expected(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """GDPO, arXiv 2601.05242, of one group that is the whole batch."""

    def in_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6)

    return in_deviations(sum((weights[name] * in_deviations(np.array(part)) for name, part in parts.items()), np.zeros(4)))


def test_gdpo_weighs_the_parts_of_a_stack_as_the_stack_does() -> None:
    swears = (1.0, 0.0, 1.0, 0.0)
    got = advantages(stack({"answer": Told(*RIGHT), "swears": Told(*swears)}, swears=-5.0))
    np.testing.assert_allclose(got, expected({"answer": RIGHT, "swears": swears}, {"answer": 1.0, "swears": -5.0}), atol=1e-5)
    assert got.argmax() == 1  # Right, and it does not swear.
    assert got[0] < 0


def test_gdpo_does_not_train_on_a_part_of_weight_zero() -> None:
    watched = stack({"answer": Told(*RIGHT), "watched": Told(0.0, 0.0, 1.0, 1.0)}, watched=0.0)
    np.testing.assert_allclose(advantages(watched), advantages(watched, grpo=True), atol=1e-5)


def test_gdpo_does_not_train_on_who_decided_in_a_cascade() -> None:
    judges = Cascade(node(kind="cascade", steps=[{"kind": "exact"}] * 2), [Told(*RIGHT), Told(0.0, 0.0, 0.0, 0.0)])
    reward = stack({"answer": judges})
    np.testing.assert_allclose(advantages(reward), advantages(reward, grpo=True), atol=1e-5)


def test_gdpo_counts_an_inner_stack_once() -> None:
    form = (0.0, 1.0, 1.0, 0.5)
    inner = stack({"form": Told(*form), "tone": Told(0.0, 0.3, 0.1, 0.2)}, tone=2.0)
    sums = tuple(value + 2.0 * tone for value, tone in zip(form, (0.0, 0.3, 0.1, 0.2), strict=True))
    got = advantages(stack({"answer": Told(*RIGHT), "style": inner}, style=0.5))
    np.testing.assert_allclose(got, expected({"answer": RIGHT, "style": sums}, {"answer": 1.0, "style": 0.5}), atol=1e-5)


async def verdicts_in_a_process(node: InProcessRewardConfig, *texts: str) -> list[Score]:
    one = RewardWorkersConfig(num_processes=1)
    workers = await RewardWorkers.start(LocalRuntime(), {"form": node}, one, search_path=[], meter=RewardMeter())
    try:
        return [await workers.score("form", PROMPT, trajectory_of(text)) for text in texts]
    finally:
        await workers.close()


def test_an_answer_on_which_the_verifier_hangs_is_no_better_than_a_wrong_one() -> None:
    patient, hasty = (RegexRewardConfig(kind="regex", pattern="(a+)+$", timeout_s=seconds) for seconds in (120.0, 0.5))
    scores = asyncio.run(verdicts_in_a_process(patient, "a", "aa", "b"))
    scores += asyncio.run(verdicts_in_a_process(hasty, "a" * 40 + "!"))
    assert [score.info for score in scores] == [{}, {}, {}, {"unjudged": 1.0}]
    got = advantages(stack({"form": Told(*scores)}))
    np.testing.assert_allclose(got, expected({"form": RIGHT}, {"form": 1.0}), atol=1e-5)


def test_a_score_of_ones_own_may_weigh_its_parts_and_tell_more() -> None:
    scores = [Score(value=0.0, parts={"a": a, "b": b}, weights={"b": -2.0}, info={"seen": a}) for a, b in [(1, 0), (0, 1)] * 2]
    got = advantages(Told(*map(as_score, scores)))
    np.testing.assert_allclose(got, expected({"a": (1, 0, 1, 0), "b": (0, 1, 0, 1)}, {"a": 1.0, "b": -2.0}), atol=1e-5)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (Score(value=1.0, parts={"a": 1.0}, weights={"b": 1.0}), "weighs b, which is none of its parts"),
        (Score(value=1.0, parts={"a": 1.0}, weights={"a": float("inf")}), "weight of part a is inf"),
        (Score(value=1.0, info={"a": float("nan")}), "info a is nan"),
        (Score(value=1.0, answer=7), "answer is a int: return text"),  # type: ignore[arg-type]
    ],
)
def test_a_score_that_makes_no_sense_is_refused_with_the_reason(score: Score, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        as_score(score)
