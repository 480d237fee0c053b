"""Short Python programs a second: at each level of the sandbox, and by a plain subprocess that contains nothing.

Each program reads a line, computes a little and prints. Two run at a time. Rounds of all kinds take turns, so that a busy
machine is busy for all of them; the median round counts. Run: python benchmarks/sandbox.py
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from report import arguments, report

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Program
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.local import LEVELS, LocalPool

SOURCE = "n = int(input())\nprint(sum(i * i for i in range(n)))"
NUM_AT_A_TIME = 2
NUM_PROGRAMS = 100
NUM_ROUNDS = 5
PLAIN = "plain subprocess"

Run = Callable[[int], Awaitable[str]]


async def plain(n: int) -> str:
    command = [sys.executable, "-c", SOURCE]
    done = await asyncio.to_thread(subprocess.run, command, input=f"{n}\n", capture_output=True, text=True, check=True)
    return done.stdout


def pooled(pool: LocalPool) -> Run:
    async def run(n: int) -> str:
        return (await pool.run(Program(source=SOURCE, stdin=f"{n}\n"))).stdout

    return run


async def time_round(run: Run) -> float:
    """Seconds for all the programs of a round. Every answer is checked."""
    places = asyncio.Semaphore(NUM_AT_A_TIME)

    async def one(n: int) -> None:
        async with places:
            answer = await run(n)
        assert int(answer) == sum(i * i for i in range(n))

    started_s = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(NUM_PROGRAMS)))
    return time.perf_counter() - started_s


async def measure() -> list[dict[str, Any]]:
    pools = []
    for level in LEVELS:
        try:
            pools.append(LocalPool(LocalSandboxConfig(level=level), num_processes=NUM_AT_A_TIME))
        except SandboxError as error:
            print(error)
    runs: dict[str, Run] = {**{pool.level: pooled(pool) for pool in pools}, PLAIN: plain}
    for run in runs.values():
        await time_round(run)
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_ROUNDS):
        for name, run in runs.items():
            rounds[name].append(await time_round(run))
    for pool in pools:
        await pool.close()
    seconds = {name: statistics.median(times) for name, times in rounds.items()}
    return [
        {"kind": name, "programs_per_s": NUM_PROGRAMS / taken_s, "times_plain": seconds[PLAIN] / taken_s}
        for name, taken_s in seconds.items()
    ]


def main() -> None:
    given = arguments(__doc__).parse_args()
    report(
        "sandbox",
        asyncio.run(measure()),
        title="Short Python programs, two at a time",
        note=f"median of {NUM_ROUNDS} rounds of {NUM_PROGRAMS} programs",
        facts={"at_a_time": NUM_AT_A_TIME, "programs_per_round": NUM_PROGRAMS},
        save=given.save,
    )


if __name__ == "__main__":
    main()
