"""What a staleness budget buys, and what it buys to train on groups as they come (`train.stream`): the production scheduler
against a heavy-tailed fake engine and a fake trainer of equal cost.

Run: python benchmarks/overlap.py
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fakes import Prompts
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll.observe.journal import Journal
from reroll.observe.metrics import Stats
from reroll.rollout.scheduler import RolloutScheduler
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn

NUM_STEPS = 40
PROMPTS_PER_STEP = 8
GROUP_SIZE = 4
SECONDS_PER_TOKEN = 0.001
MIN_TOKENS, MAX_TOKENS = 16, 256
COMPLETION = Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))


class Engine:
    """Decodes one step's worth of samples at once; lengths are Pareto, cut at the longest allowed, and follow the seed."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROMPTS_PER_STEP * GROUP_SIZE)

    async def episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        num_tokens = min(MAX_TOKENS, MIN_TOKENS * random.Random(seed).paretovariate(1.2))
        async with self._slots:
            await asyncio.sleep(num_tokens * SECONDS_PER_TOKEN)
        return Trajectory(id=id, turns=(Turn(prompt_ids=(1,), completion=COMPLETION, text=""),), status=Status.COMPLETED)


async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(value=0.0)


async def run(folder: Path, *, max_staleness: int, train_s: float) -> tuple[float, Stats]:
    config = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE, max_staleness=max_staleness)
    engine = Engine()
    with Journal(folder / f"{max_staleness}-{train_s}.jsonl") as journal:
        scheduler = RolloutScheduler(config, Prompts(), episode=engine.episode, score=score, journal=journal, seed=0)
        started_s = time.perf_counter()
        for step in range(NUM_STEPS):
            groups = await scheduler.take(PROMPTS_PER_STEP)
            await asyncio.sleep(train_s)
            scheduler.release(groups, version=step + 1)
        wall_s = time.perf_counter() - started_s
        await scheduler.close()
    return wall_s, scheduler.stats()


async def measure(folder: Path) -> tuple[list[dict[str, Any]], float, float]:
    alone_s, _ = await run(folder, max_staleness=0, train_s=0.0)
    generate_s = alone_s / NUM_STEPS
    train_s = generate_s  # Equal cost: the case in which overlap can win most.
    rows: list[dict[str, Any]] = []
    for max_staleness in (0, 1, 2, 4):
        wall_s, stats = await run(folder, max_staleness=max_staleness, train_s=train_s)
        seen = stats.values_by_name()
        rows.append(
            {
                "max_staleness": max_staleness,
                "wall_s": wall_s,
                "speedup": rows[0]["wall_s"] / wall_s if rows else 1.0,
                "seen_max": int(seen["rollout/staleness_max"]),
                "seen_mean": seen["rollout/staleness"],
                "sample_s": seen["time/generate_s"],
            }
        )
    return rows, generate_s, train_s


async def run_streamed(folder: Path, *, max_staleness: int, train_s: float, early: bool) -> float:
    """Seconds of all steps, with a trainer that takes so long for all groups of a step and gets them as `take_parts` does."""
    config = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE, max_staleness=max_staleness)
    engine = Engine()
    with Journal(folder / f"{max_staleness}-{early}.jsonl") as journal:
        scheduler = RolloutScheduler(config, Prompts(), episode=engine.episode, score=score, journal=journal, seed=0)
        started_s = time.perf_counter()
        for step in range(NUM_STEPS):
            groups = []
            async for part in scheduler.take_parts(PROMPTS_PER_STEP, early=early):
                groups += part
                await asyncio.sleep(train_s * len(part) / PROMPTS_PER_STEP)
            scheduler.release(groups, version=step + 1)
        wall_s = time.perf_counter() - started_s
        await scheduler.close()
    return wall_s


async def measure_streamed(folder: Path, *, generate_s: float) -> list[dict[str, Any]]:
    """With a trainer as slow as the engine, and one that takes a third of it; waiting for all groups and not, in turn."""
    rows = []
    for share in (1.0, 1 / 3):
        for max_staleness in (0, 1):
            wall_s = {
                early: await run_streamed(folder, max_staleness=max_staleness, train_s=share * generate_s, early=early)
                for early in (False, True)
            }
            row = {"train_of_generate": share, "max_staleness": max_staleness}
            rows.append(row | {"waiting_s": wall_s[False], "streamed_s": wall_s[True], "speedup": wall_s[False] / wall_s[True]})
    return rows


def main() -> None:
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, generate_s, train_s = asyncio.run(measure(Path(folder)))
        streamed = asyncio.run(measure_streamed(Path(folder), generate_s=generate_s))
    in_turn_s = NUM_STEPS * (generate_s + train_s)
    overlapped_s = NUM_STEPS * max(generate_s, train_s) + generate_s  # The first step has nothing to overlap with.
    bound = in_turn_s / overlapped_s
    report(
        "overlap",
        rows,
        title=f"{NUM_STEPS} steps of {generate_s:.3f} s generation and {train_s:.3f} s training",
        note=f"theory: one after the other {in_turn_s:.2f} s; perfect overlap {overlapped_s:.2f} s ({bound:.2f}x)",
        facts={"theory_in_turn_s": in_turn_s, "theory_overlapped_s": overlapped_s, "theory_speedup": bound},
        save=given.save,
    )
    report("stream", streamed, title=f"{NUM_STEPS} steps, trained on as groups come or when all are there", save=given.save)


if __name__ == "__main__":
    main()
