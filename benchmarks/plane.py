"""The environment plane as benchmarks drive it: real workers, scheduler and episodes; a fake policy that answers at once."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fakes import Prompts
from pydantic import TypeAdapter

from reroll.config.envs import EnvDomainConfig, EnvWorkersConfig
from reroll.config.parts import RolloutConfig
from reroll.envs.actions import ParsedEnv
from reroll.envs.cluster import EnvCluster
from reroll.envs.make import make_env
from reroll.observe.journal import Journal
from reroll.rollout.play import play, stable_seed
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.local import LocalRuntime
from reroll.tokens.renderer import Renderer
from reroll.types import Completion, FinishReason, Message, Prompt, Request, SamplingParams, Score, Trajectory

DOMAIN = "fake"
"""Of the prompts that `fakes` makes."""
RUN_SEED = 0


@dataclass(frozen=True)
class Task:
    """An environment, and the actions that a policy picks from at random."""

    entry: EnvDomainConfig
    actions: tuple[str, ...]


class RandomPolicy:
    """One episode's player: equal seeds choose alike, in the plane and in a bare loop."""

    def __init__(self, seed: int, task: Task) -> None:
        self._rng = random.Random(seed)
        self._num_actions = len(task.actions)

    def choose(self) -> int:
        return int(self._rng.random() * self._num_actions)

    async def generate(self, request: Request) -> Completion:
        return Completion(token_ids=(self.choose(),), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))


class Vocabulary:
    """Stands in for the tokenizer, which is no part of the plane: a token of the policy is a whole answer."""

    stop_token_ids = (-1,)

    def __init__(self, task: Task) -> None:
        self._answers = [f"<answer>{action}</answer>" for action in task.actions]

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (0,) * len(messages)

    def extend(
        self, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        return (*prompt_ids, *completion_ids, *self.start(messages))

    def decode(self, ids: tuple[int, ...]) -> str:
        return self._answers[ids[0]]


@asynccontextmanager
async def open_cluster(task: Task, **settings: Any) -> AsyncIterator[EnvCluster]:
    """A cluster of the task's environment, with `env_workers` settings."""
    config = TypeAdapter[EnvWorkersConfig](EnvWorkersConfig).validate_python(settings)
    cluster = await EnvCluster.start(LocalRuntime(), config, {DOMAIN: task.entry.env})
    try:
        yield cluster
    finally:
        await cluster.close()


async def play_all(
    cluster: EnvCluster, task: Task, folder: Path, *, num_steps: int, prompts_per_step: int, group_size: int = 1
) -> tuple[float, int]:
    """Seconds that `num_steps` steps of rollouts take, from the first admission to the last reward; and turns played.

    A step admits all its episodes at once and waits for the last of them.
    """
    renderer = cast(Renderer, Vocabulary(task))

    async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
        return await play(
            ParsedEnv(cluster.live(prompt.domain, seed), task.entry.actions, format_penalty=task.entry.format_penalty),
            RandomPolicy(seed, task).generate,
            renderer,
            SamplingParams(max_tokens=16, seed=seed),
            id=id,
            max_prompt_tokens=1024,
            max_turns=task.entry.max_turns,
        )

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=trajectory.reward)

    num_turns = 0
    config = RolloutConfig(prompts_per_step=prompts_per_step, group_size=group_size)
    with Journal(folder / "journal") as journal:
        scheduler = RolloutScheduler(config, Prompts(), episode=episode, score=score, journal=journal, seed=RUN_SEED)
        started_s = time.perf_counter()
        groups = await scheduler.take(prompts_per_step)
        for step in range(1, num_steps):
            num_turns += sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
            scheduler.release(groups, version=step)
            groups = await scheduler.take(prompts_per_step)
        wall_s = time.perf_counter() - started_s
        num_turns += sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
        await scheduler.close()
    return wall_s, num_turns


def play_bare(task: Task, *, num_episodes: int) -> tuple[float, int]:
    """The same episodes as `play_all` plays one a group, by calling the environment in a loop: seconds, and turns played."""
    seeds = [stable_seed(RUN_SEED, ticket, 0) for ticket in range(num_episodes)]
    num_turns = 0
    started_s = time.perf_counter()
    for seed in seeds:
        policy = RandomPolicy(seed, task)
        env = make_env(task.entry.env)
        env.reset(seed)
        is_over = False
        while not is_over:
            outcome = env.step(task.actions[policy.choose()])
            is_over = outcome.terminated or outcome.truncated
            num_turns += 1
        env.close()
    return time.perf_counter() - started_s, num_turns
