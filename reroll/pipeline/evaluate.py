"""Held-out evaluation: how often answers pass, by domain, with the same episodes and rewards that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

from reroll.config.parts import EvalConfig
from reroll.config.registry import load_entry
from reroll.errors import RewardError
from reroll.observe.metrics import Stats
from reroll.rollout.play import Episode, replayed
from reroll.rollout.scheduler import ScoreOne
from reroll.types import Prompt, Status, Trajectory


class RateEstimate(Protocol):
    """A rate between 0 and 1 and its 95 % confidence interval."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class EvalResult(Protocol):
    """The policy's trajectories on every held-out prompt, and how often they pass.

    Made of the first three, in this order, by what the entry point `result` of the group `reroll.evaluation` names.
    """

    @property
    def prompts(self) -> tuple[Prompt, ...]: ...
    @property
    def trajectories(self) -> tuple[tuple[Trajectory, ...], ...]:
        """For each prompt, its samples."""

    @property
    def settings(self) -> EvalConfig: ...
    @property
    def domains(self) -> list[str]: ...
    @property
    def pass_rate(self) -> float:
        """pass@1 of all prompts."""

    def estimates(self, domain: str | None = None) -> Mapping[str, RateEstimate]:
        """pass@k, avg@n and maj@k of a domain's prompts, or of all."""

    def average(self) -> RateEstimate:
        """pass@1, every domain counting alike."""

    def means(self) -> dict[str, float]:
        """Reward, length, turns and failures, by metric."""

    def stats(self) -> Stats:
        """All of it as metrics."""

    def as_dict(self) -> dict[str, Any]:
        """Numbers and every completion, for a JSON file."""


async def evaluate(
    prompts: Sequence[Prompt],
    episode: Episode,
    score: ScoreOne,
    *,
    settings: EvalConfig,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Play every prompt as often as its domain's settings say, all at once: the engine batches them. `on_done` ticks a
    progress bar."""

    async def one(prompt: Prompt, sample: int, sample_seed: int) -> Trajectory:
        trajectory = await replayed(episode, prompt, f"{prompt.id}/{sample}", sample_seed)
        if trajectory.is_usable:
            try:
                trajectory = trajectory.scored(await score(prompt, trajectory))
            except RewardError as error:
                trajectory = replace(trajectory, status=Status.FAILED, reason=str(error))
        on_done()
        return trajectory

    nums = [settings.of(prompt.domain).samples for prompt in prompts]
    firsts = accumulate(nums[:-1], initial=seed)
    async with asyncio.TaskGroup() as group:
        tasks = [
            [group.create_task(one(prompt, sample, first + sample)) for sample in range(num)]
            for prompt, num, first in zip(prompts, nums, firsts, strict=True)
        ]
    trajectories = tuple(tuple(task.result() for task in row) for row in tasks)
    result: EvalResult = load_entry("reroll.evaluation", "result")(tuple(prompts), trajectories, settings)
    return result


def num_episodes(prompts: Sequence[Prompt], settings: EvalConfig) -> int:
    """How many samples an evaluation draws."""
    return sum(settings.of(prompt.domain).samples for prompt in prompts)
