"""Rewards made of rewards: a weighted sum, and one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy

from reroll.errors import RewardError
from reroll.rewards.base import Reward, ask
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.combined.config import CascadeRewardConfig, StackRewardConfig


class Stack:
    """The weighted sum of its parts, which judge at the same time. If one cannot judge, none of it counts."""

    def __init__(self, config: StackRewardConfig, parts: Sequence[Reward]) -> None:
        self._config = config
        self._parts = dict(zip(config.parts, parts, strict=True))

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(_named(name, part, prompt, trajectory)) for name, part in self._parts.items()}
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return self._sum({name: task.result() for name, task in tasks.items()})

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        value = sum(self._config.parts[name].weight * score.value for name, score in scores.items())
        if self._config.clip is not None:
            low, high = self._config.clip
            value = min(max(value, low), high)
        return Score(
            value=value,
            parts={name: score.value for name, score in scores.items()},
            weights={name: self._config.parts[name].weight for name in scores},
            info=dict(_below(scores)),
            answer=_answer(scores.values()),
        )


class Cascade:
    """Asks one after the other until one passes the answer. The last one asked has the say; its index is `decided_by`.

    It is one reward, whoever decides: what its steps said is told, but is no part of it.
    """

    def __init__(self, config: CascadeRewardConfig, steps: Sequence[Reward]) -> None:
        self._threshold = config.threshold
        self._steps = steps

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        scores: dict[str, Score] = {}
        for index, step in enumerate(self._steps):
            is_last = index == len(self._steps) - 1
            try:
                score = scores[f"step_{index}"] = await _named(f"step {index}", step, prompt, trajectory)
            except RewardError:
                if is_last:
                    raise
                continue
            if is_last or score.value >= self._threshold:
                break
        asked = {name: score.value for name, score in scores.items()}
        info = {**asked, **dict(_below(scores)), "decided_by": float(index)}
        return Score(value=score.value, info=info, answer=_answer(reversed(scores.values())))


async def _named(name: str, reward: Reward, prompt: Prompt, trajectory: Trajectory) -> Score:
    try:
        return await ask(reward, prompt, trajectory)
    except RewardError as error:
        named = copy(error)  # Others may wait for the same verdict.
        named.args = (f"{name}: {error}",)
        raise named from error


def _below(scores: Mapping[str, Score]) -> Iterator[tuple[str, float]]:
    """What the parts of parts are worth and what was measured about them, their names behind a dot."""
    for name, score in scores.items():
        for part, value in score.named.items():
            yield f"{name}.{part}", value


def _answer(scores: Iterable[Score]) -> str | None:
    """The first final answer that one of them read."""
    return next((score.answer for score in scores if score.answer is not None), None)
