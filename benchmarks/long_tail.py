"""What slow steps cost: 256 episodes of 8 to 50 steps with heavy-tailed latencies, one coroutine each against lock-step.

Both play the same environments with the same latencies. In lock-step every step of the batch waits for its slowest
episode. The ideal is the longest episode, or all work divided by the slots, whichever is more.
Run: python benchmarks/long_tail.py
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from plane import DOMAIN, RUN_SEED, Task, open_cluster, play_all
from report import arguments, report

from reroll.config.envs import EnvDomainConfig, ImportEnvConfig
from reroll.envs.base import StepResult
from reroll.rollout.play import stable_seed
from reroll.types import Message

NUM_PROMPTS, GROUP_SIZE = 32, 8
NUM_EPISODES = NUM_PROMPTS * GROUP_SIZE
MIN_STEPS, MAX_STEPS = 8, 50
CASES = (("lognormal", NUM_EPISODES), ("lognormal", NUM_EPISODES // 4), ("pareto", NUM_EPISODES))
"""Tail and slots: environments that exist at once; in lock-step, steps that run at once."""


def draw_latencies(seed: int, tail: str) -> list[float]:
    """Seconds that each step of the episode takes. The tail is not cut off."""
    rng = random.Random(seed)
    num_steps = rng.randint(MIN_STEPS, MAX_STEPS)
    if tail == "pareto":
        return [0.004 * rng.paretovariate(1.5) for _ in range(num_steps)]
    return [0.010 * rng.lognormvariate(0.0, 1.0) for _ in range(num_steps)]


class SlowEnv:
    """Takes its time for every step, and ends after the last."""

    def __init__(self, tail: str) -> None:
        self._tail = tail

    async def reset(self, seed: int) -> tuple[Message, ...]:
        self._latencies_s = draw_latencies(seed, self._tail)[::-1]
        return ({"role": "user", "content": "go on"},)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._latencies_s.pop())
        if not self._latencies_s:
            return StepResult(terminated=True)
        return StepResult(messages=({"role": "user", "content": "go on"},))

    async def close(self) -> None:
        return None


def task_of(tail: str) -> Task:
    env = ImportEnvConfig(kind="import", path="long_tail:SlowEnv", options={"tail": tail})
    return Task(EnvDomainConfig(env=env, max_turns=MAX_STEPS), actions=("go",))


def seeds() -> list[int]:
    """Those that the scheduler gives its samples."""
    return [stable_seed(RUN_SEED, ticket, sibling) for ticket in range(NUM_PROMPTS) for sibling in range(GROUP_SIZE)]


async def scheduled(tail: str, *, slots: int) -> float:
    """Seconds until the scheduler has all groups."""
    task = task_of(tail)
    with tempfile.TemporaryDirectory() as folder:
        async with open_cluster(task, kind="inline", max_live=slots) as cluster:
            wall_s, num_turns = await play_all(
                cluster, task, Path(folder), num_steps=1, prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE
            )
    assert num_turns == sum(len(draw_latencies(seed, tail)) for seed in seeds())
    return wall_s


async def lock_step(tail: str, *, slots: int) -> float:
    """Seconds until the last episode is over when all wait for each other at every step."""
    free = asyncio.Semaphore(slots)
    async with open_cluster(task_of(tail), kind="inline", max_live=NUM_EPISODES) as cluster:
        started_s = time.perf_counter()
        active = [cluster.live(DOMAIN, seed) for seed in seeds()]
        await asyncio.gather(*(env.reset() for env in active))

        async def step(index: int) -> StepResult:
            async with free:
                return await active[index].step("go")

        while active:
            outcomes = await asyncio.gather(*(step(index) for index in range(len(active))))
            await asyncio.gather(*(env.close() for env, outcome in zip(active, outcomes, strict=True) if outcome.terminated))
            active = [env for env, outcome in zip(active, outcomes, strict=True) if not outcome.terminated]
        return time.perf_counter() - started_s


def ideal_s(tail: str, *, slots: int) -> float:
    totals_s = [sum(draw_latencies(seed, tail)) for seed in seeds()]
    return max(max(totals_s), sum(totals_s) / slots)


def measure(tail: str, slots: int, *, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    ours_s, barrier_s = [], []
    for _ in range(rounds):
        ours_s.append(asyncio.run(scheduled(tail, slots=slots)))
        barrier_s.append(asyncio.run(lock_step(tail, slots=slots)))
    ideal, ours, barrier = ideal_s(tail, slots=slots), statistics.median(ours_s), statistics.median(barrier_s)
    row = {
        "tail": tail,
        "slots": slots,
        "ideal_s": ideal,
        "reroll_s": ours,
        "lock_step_s": barrier,
        "of_ideal": ours / ideal,
        "faster_by": barrier / ours,
        "at_least": min(theirs / mine for theirs, mine in zip(barrier_s, ours_s, strict=True)),
    }
    return row, {"reroll_s": ours_s, "lock_step_s": barrier_s}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rounds: int = given.rounds
    measured = {f"{tail}/{slots}": measure(tail, slots, rounds=rounds) for tail, slots in CASES}
    report(
        "long_tail",
        [row for row, _ in measured.values()],
        title=f"{NUM_EPISODES} episodes of {MIN_STEPS} to {MAX_STEPS} steps with heavy-tailed latencies",
        note=f"median of {rounds} interleaved rounds",
        facts={"spread": {case: spread for case, (_, spread) in measured.items()}},
        save=given.save,
    )


if __name__ == "__main__":
    main()
