"""Verdicts a second of every kind of reward through the whole plane, and what a slow judge costs a run.

The second part trains for show: the production scheduler and rewards, a fake engine and trainer that take as long as one GRPO
step of SmolLM2-135M on two cores (4.4 s of generation, 8.3 s of training), and a judge that takes 5 s for a tenth of the
samples. Time runs ten times as fast.
Run: python benchmarks/rewards.py
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from fakes import Prompts
from pydantic import TypeAdapter
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll.config.reward_base import RewardConfig
from reroll.observe.journal import Journal
from reroll.rewards.cluster import RewardCluster
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.local import LocalRuntime
from reroll.testing import trajectory_of
from reroll.types import Message, Prompt, SamplingParams, Trajectory
from reroll_zoo.judge.answer import Answer

DOMAIN = "fake"
"""Of the prompts that `fakes` makes."""
IN_FLIGHT = 64
PROCESSES = "processes"


def trivial(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(len(trajectory.text))


async def trivial_async(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(len(trajectory.text))


WORDS = "We add the numbers step by step, keep the carry in mind and look at the sum once more before we answer. " * 4
ROW: dict[str, Any] = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 20}],
    "tests": {"function": "add", "calls": [{"args": [a, a], "returns": 2 * a} for a in range(4)]},
    "schema": {"type": "object", "required": ["sum"]},
}
PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"
INLINE_STACK = {"answer": {"kind": "numeric"}, "long": {"kind": "overlong", "max_tokens": 64, "buffer_tokens": 16}}
KINDS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("exact", {"kind": "exact"}, "inline", "2", "2"),
    ("numeric", {"kind": "numeric"}, "inline", "2", WORDS + "2"),
    ("choice", {"kind": "choice"}, "inline", "B", WORDS + "The answer is (B)."),
    ("f1", {"kind": "f1"}, "inline", "the sum once more", WORDS),
    ("substring", {"kind": "substring"}, "inline", "the sum once more", WORDS),
    ("instructions", {"kind": "instructions"}, "inline", "", WORDS),
    ("repetition", {"kind": "repetition"}, "inline", "", WORDS),
    ("language", {"kind": "language"}, "inline", "", WORDS),
    ("stack of two inline parts", {"kind": "stack", "parts": INLINE_STACK}, "inline", "2", WORDS + "2"),
    ("import", {"kind": "import", "path": "rewards:trivial"}, PROCESSES, "", WORDS),
    ("import, async", {"kind": "import", "path": "rewards:trivial_async"}, PROCESSES, "", WORDS),
    ("regex", {"kind": "regex", "pattern": r"\bsum\b"}, PROCESSES, "", WORDS),
    ("json_schema", {"kind": "json_schema"}, PROCESSES, "", '{"sum": 2}'),
    ("math, equal strings", {"kind": "math"}, PROCESSES, "1/2", WORDS + r"\boxed{1/2}"),
    ("math, algebra", {"kind": "math"}, PROCESSES, r"\frac{x+1}{2}", WORDS + r"\boxed{0.5x + 0.5}"),
    ("reasoning_gym", {"kind": "reasoning_gym"}, PROCESSES, "2", "2"),
    ("code, 4 calls", {"kind": "code"}, "sandbox", "", PROGRAM),
]
"""Name, node, where it runs, reference answer, what the policy said."""


def prompt_of(answer: str) -> Prompt:
    extra = ROW | {"reasoning_gym": {"name": "chain_sum", "options": {}, "entry": {"answer": "2", "metadata": {}}}}
    return Prompt(id="fake/0", messages=({"role": "user", "content": "1 + 1"},), domain=DOMAIN, answer=answer, extra=extra)


async def verdicts_per_second(node: dict[str, Any], prompt: Prompt, text: str, *, seconds: float) -> tuple[float, float]:
    """Verdicts a second with many samples in flight, and the mean time one takes then."""
    configs = {DOMAIN: TypeAdapter[RewardConfig](RewardConfig).validate_python(node)}
    num_done = 0
    async with LocalRuntime() as runtime:
        rewards = await RewardCluster.start(runtime, configs, config_folder=Path(__file__).parent)
        trajectory = trajectory_of(text)
        await asyncio.gather(*(rewards.score(prompt, trajectory) for _ in range(8)))
        rewards.stats()
        started_s = time.perf_counter()

        async def keep_asking() -> None:
            nonlocal num_done
            while time.perf_counter() - started_s < seconds:
                await rewards.score(prompt, trajectory)
                await asyncio.sleep(0)
                num_done += 1

        await asyncio.gather(*(keep_asking() for _ in range(IN_FLIGHT)))
        wall_s = time.perf_counter() - started_s
        latency_s = rewards.stats().values_by_name()[f"judging/{DOMAIN}/latency_s"]
        await rewards.close()
    return num_done / wall_s, latency_s


def measure_kinds(*, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name, node, place, answer, text in KINDS:
        per_s, latency_s = asyncio.run(verdicts_per_second(node, prompt_of(answer), text, seconds=seconds))
        rows.append({"kind": name, "runs": place, "verdicts_per_s": per_s, "latency_ms": 1000 * latency_s})
    return rows


SPEED = 10.0
"""Times as fast as the clock."""
PROMPTS_PER_STEP, GROUP_SIZE = 4, 8
GENERATE_S, TRAIN_S = 4.4 / SPEED, 8.3 / SPEED
JUDGE_S, SLOW_SHARE = 5.0 / SPEED, 0.1
CASES: tuple[dict[str, int], ...] = (
    {"max_staleness": 0},
    {"max_staleness": 0, "extra_samples": 2},
    {"max_staleness": 1},
    {"max_staleness": 1, "extra_samples": 1},
    {"max_staleness": 2, "take_window": 3},
)


class SlowJudge:
    """A judging model that is slow now and then."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        if random.Random(messages[0]["content"]).random() < SLOW_SHARE:
            await asyncio.sleep(self._seconds)
        return Answer(text="Score: 10")

    async def close(self) -> None:
        return None


class Engine:
    """Decodes one step's worth of samples at once. Lengths vary by half; the longest of a step takes GENERATE_S."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROMPTS_PER_STEP * GROUP_SIZE)
        self._numbers = count()

    async def episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        async with self._slots:
            await asyncio.sleep(GENERATE_S * random.Random(seed).uniform(0.5, 1.0))
        return trajectory_of(f"sample {next(self._numbers)}")  # Equal answers would be judged once.


async def step_seconds(folder: Path, settings: dict[str, int], *, judge_s: float, num_steps: int) -> float:
    """Seconds a step takes in the mean, after the first."""
    config = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE, **settings)
    node = {"kind": "judge", "model": {"kind": "hosted", "model": "none"}}
    configs = {DOMAIN: TypeAdapter[RewardConfig](RewardConfig).validate_python(node)}
    async with LocalRuntime() as runtime:
        rewards = await RewardCluster.start(runtime, configs, hosts={DOMAIN: SlowJudge(seconds=judge_s)})
        with Journal(folder / "journal") as journal:
            scheduler = RolloutScheduler(
                config, Prompts(), episode=Engine().episode, score=rewards.score, journal=journal, seed=0
            )
            ends_s = []
            for step in range(num_steps + 1):
                groups = await scheduler.take(PROMPTS_PER_STEP)
                await asyncio.sleep(TRAIN_S)
                scheduler.release(groups, version=step + 1)
                ends_s.append(time.perf_counter())
            await scheduler.close()
        await rewards.close()
    return (ends_s[-1] - ends_s[0]) / num_steps


def measure_slow_judge(*, num_steps: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for settings in CASES:
        instant_s, slow_s = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for judge_s, seen_s in ((0.0, instant_s), (JUDGE_S, slow_s)):
                    seconds = asyncio.run(step_seconds(Path(folder), settings, judge_s=judge_s, num_steps=num_steps))
                    seen_s.append(SPEED * seconds)
        instant, slow = statistics.median(instant_s), statistics.median(slow_s)
        told = ", ".join(f"{name} {value}" for name, value in settings.items())
        rows.append(
            {"rollout": told, "instant_step_s": instant, "slow_step_s": slow, "lost_percent": 100 * (slow / instant - 1)}
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kind")
    parser.add_argument("--steps", type=int, default=20, help="of each run with a judge")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    kinds = measure_kinds(seconds=given.seconds)
    report("rewards", kinds, title="verdicts through the whole plane", note=f"{IN_FLIGHT} samples in flight", save=given.save)
    report(
        "slow_judge",
        measure_slow_judge(num_steps=given.steps, rounds=given.rounds),
        title=f"a judge that takes {SPEED * JUDGE_S:g} s for {SLOW_SHARE:.0%} of the samples, against one that takes none",
        note=f"median of {given.rounds} interleaved rounds of {given.steps} steps of {PROMPTS_PER_STEP} x {GROUP_SIZE} samples",
        facts={"speed": SPEED, "generate_s": SPEED * GENERATE_S, "train_s": SPEED * TRAIN_S},
        save=given.save,
    )


if __name__ == "__main__":
    main()
