"""What the controller itself costs: samples in flight, completions a second on one core, memory of a sample that waits.

Episodes and scores are fakes that cost next to nothing, so all the time measured is the scheduler's and the journal's.
Run: python benchmarks/scheduler.py
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from fakes import Prompts
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll.observe.journal import Journal
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.cpu import gc_frozen
from reroll.types import Completion, FinishReason, Group, Prompt, Score, Status, Trajectory, Turn

NUM_IN_FLIGHT = 20_000
GROUP_SIZE = 8
NUM_STEPS = 3
COMPLETION = Completion(token_ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0), finish_reason=FinishReason.STOP, versions=((0, 3),))


class Gate:
    """An engine that holds every sample until it is opened: then all of them finish as fast as the controller can take them."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future
        turn = Turn(prompt_ids=(1,), completion=COMPLETION, text="")
        return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED)

    def open(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(value=float(len(trajectory.id) % 2))


async def fill(gate: Gate, scheduler: RolloutScheduler) -> asyncio.Task[list[Group]]:
    """Start a take, and wait until every sample of the step waits in the engine."""
    take = asyncio.create_task(scheduler.take(NUM_IN_FLIGHT // GROUP_SIZE))
    while gate.num_waiting < NUM_IN_FLIGHT:
        await asyncio.sleep(0)
    return take


def make(gate: Gate, journal: Journal) -> RolloutScheduler:
    config = RolloutConfig(prompts_per_step=NUM_IN_FLIGHT // GROUP_SIZE, group_size=GROUP_SIZE)
    return RolloutScheduler(config, Prompts(), episode=gate.episode, score=score, journal=journal, seed=0)


async def measure_speed(folder: Path) -> list[dict[str, Any]]:
    gate = Gate()
    rows = []
    groups: list[Group] = []
    with Journal(folder / "speed.jsonl") as journal:
        scheduler = make(gate, journal)
        for step in range(NUM_STEPS):
            started_s = time.perf_counter()
            if groups:
                scheduler.release(groups, version=step)
            take = await fill(gate, scheduler)
            filled_s = time.perf_counter()
            gate.open()
            groups = await take
            taken_s = time.perf_counter()
            rows.append(
                {
                    "step": step,
                    "in_flight": NUM_IN_FLIGHT,
                    "starts_per_s": NUM_IN_FLIGHT / (filled_s - started_s),
                    "completions_per_s": NUM_IN_FLIGHT / (taken_s - filled_s),
                    "whole_lives_per_s": NUM_IN_FLIGHT / (taken_s - started_s),
                }
            )
        await scheduler.close()
    return rows


async def measure_memory(folder: Path) -> float:
    """Bytes that one waiting sample costs: task, coroutines, future and its share of the group."""
    gate = Gate()
    with Journal(folder / "memory.jsonl") as journal:
        scheduler = make(gate, journal)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        take = await fill(gate, scheduler)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        take.cancel()
        await scheduler.close()
    return (after - before) / NUM_IN_FLIGHT


def main() -> None:
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        with gc_frozen():  # As in a run.
            rows = asyncio.run(measure_speed(Path(folder)))
        bytes_per_sample = asyncio.run(measure_memory(Path(folder)))
    report(
        "scheduler",
        rows,
        title="The controller alone, one core, fake engine and reward",
        note=f"{bytes_per_sample:,.0f} bytes per waiting sample; five journal events per sample are written to disk",
        facts={"bytes_per_waiting_sample": round(bytes_per_sample), "group_size": GROUP_SIZE},
        save=given.save,
    )


if __name__ == "__main__":
    main()
