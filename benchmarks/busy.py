"""The quickstart's step on a busy machine: beside 0, 2 and 8 processes that only spin, for fixed settings of the threads and
for reroll's own choice.

Each contestant is a process that waits until it is its turn, so that turns interleave step by step and a slow minute of the
machine hits all alike. `python benchmarks/busy.py`, or with `--model smollm2-135m-instruct` a step that wants every core.
The load that others put on the machine is printed beside the times: on a machine that is not idle, "beside 0" is not either.

Up to which size one thread is as fast as all cores, an idle machine alone can tell (a ratio of reroll above 1: one is faster):

    for size in 64 128 256 512; do python benchmarks/busy.py --hidden $size --beside 0 --turns 40 --only reroll "1 thread"; done
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import arguments, report

HERE = Path(__file__).parent
WARM_UP = 2
"""Turns that are taken and not counted."""

DEFAULT = "torch's default"
"""What a process gets in which nobody chooses anything: as many threads as cores, which spin."""
CHOICES: Mapping[str, Mapping[str, str]] = {
    "reroll": {},
    DEFAULT: {},
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "passive wait": {"OMP_WAIT_POLICY": "passive"},
}
"""What each contestant's environment has."""


class Contestant:
    """A child process that takes a training step whenever it is told to."""

    def __init__(self, name: str, env: Mapping[str, str], work: Path) -> None:
        self.name = name
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(work), name],
            env={**ours, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        self.facts = self._read()

    def step_s(self) -> float:
        """Take one step; how long it took."""
        assert self._child.stdin is not None
        print("step", file=self._child.stdin, flush=True)
        return float(self._read()["seconds"])

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("RESULT "):
                told: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return told
        raise SystemExit(f"{self.name} failed")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=20, help="steps of each contestant at each load")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2, 8], help="numbers of spinning processes")
    parser.add_argument("--model", default="tiny", help="tiny (the quickstart's), a folder or a name that reroll fetches")
    parser.add_argument("--hidden", type=int, default=64, help="how wide the tiny model is; the quickstart's: 64")
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=list(CHOICES))
    args = parser.parse_args()
    if args.child:
        asyncio.run(take_part(Path(args.child[0]), args.child[1]))
        return
    with TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        (work / "config.json").write_text(json.dumps(make_work(work, args.model, hidden=args.hidden)))
        contestants = []
        for name in args.only:
            contestants.append(Contestant(name, CHOICES[name], work))
            stack.callback(contestants[-1].stop)
        for contestant in contestants:
            contestant.wait_until_ready()
        rows = [row for num in args.beside for row in compete(contestants, num_spinning=num, turns=args.turns)]
    note = (
        "ratio: to the best fixed choice, by the mean; every step counts, so a mean shows what a median hides. "
        "between: where 9 of 10 such runs would find it"
    )
    facts = {"settings": {one.name: one.facts for one in contestants}, "turns": args.turns}
    model = args.model if args.hidden == 64 else f"{args.model}-{args.hidden}"
    name = "busy" if model == "tiny" else f"busy_{Path(model).name}"
    report(name, rows, title=f"A step of GRPO on a busy machine, {model}", note=note, facts=facts, save=args.save)


def compete(contestants: list[Contestant], *, num_spinning: int, turns: int) -> list[dict[str, Any]]:
    """A row for each contestant. The order is shuffled in each round, or one would always follow the same other."""
    seconds: dict[str, list[float]] = {one.name: [] for one in contestants}
    loads: list[float] = []
    order, rng = list(contestants), random.Random(0)
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(num_spinning)]
    for process in spinning:
        process.start()
    try:
        for turn in range(turns + WARM_UP):
            rng.shuffle(order)
            for contestant in order:
                step_s = contestant.step_s()
                if turn >= WARM_UP:
                    seconds[contestant.name].append(step_s)
            loads.append(os.getloadavg()[0])
            if turn % 10 == 0:
                print(f"beside {num_spinning}: turn {turn} of {turns + WARM_UP}, load {loads[-1]:.1f}", flush=True)
    finally:
        for process in spinning:
            process.kill()
            process.join()
    means = {name: statistics.fmean(times) for name, times in seconds.items()}
    for name, mean in means.items():  # At once: a run that is cut short has told of the loads that it has seen.
        print(
            f"beside {num_spinning}: {name}: {mean:.3f} s, {ratio_to_best(seconds, name, range(turns)):.2f} of the best",
            flush=True,
        )
    return [
        {
            "beside": f"{num_spinning} spinning",
            "load": round(statistics.fmean(loads), 1),
            "threads": name,
            "mean_s": means[name],
            "median_s": statistics.median(times),
            "worst_s": max(times),
            "ratio": ratio_to_best(seconds, name, range(turns)),
            "between": likely_ratios(seconds, name, turns),
        }
        for name, times in seconds.items()
    ]


def ratio_to_best(seconds: Mapping[str, list[float]], name: str, turns: Sequence[int]) -> float:
    """One's mean over these turns to that of the best fixed choice."""
    means = {other: statistics.fmean(times[turn] for turn in turns) for other, times in seconds.items()}
    return means[name] / min((mean for other, mean in means.items() if other != "reroll"), default=means[name])


def likely_ratios(seconds: Mapping[str, list[float]], name: str, turns: int) -> str:
    """Where 9 of 10 runs like this one would find the ratio: turns drawn again, each with all that happened in it."""
    rng = random.Random(0)
    drawn = sorted(ratio_to_best(seconds, name, rng.choices(range(turns), k=turns)) for _ in range(1000))
    return f"{drawn[50]:.2f} to {drawn[949]:.2f}"


def _spin() -> None:
    while True:
        pass


def make_work(folder: Path, model: str, *, hidden: int) -> dict[str, Any]:
    """The quickstart's GRPO config, on data of its own; another model gets fewer, longer samples."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from quickstart import make_tasks

    from reroll_zoo.fetch.fetch import fetch
    from reroll_zoo.tiny_models import make_tiny

    rows = make_tasks(2000, random.Random(0), set())
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"prompts_per_step": 32, "group_size": 8, "max_prompt_tokens": 32, "max_tokens": 12}
    if model == "tiny":
        make_tiny(folder / "model", hidden=hidden, layers=3, heads=4, kv_heads=4, seed=0)
        model = str(folder / "model")
    else:
        model = model if Path(model).is_dir() else str(fetch(model))
        rollout = {"prompts_per_step": 2, "group_size": 8, "max_prompt_tokens": 64, "max_tokens": 32}
    return {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "run": {"name": "busy", "steps": 1_000_000},
        "policy": {"model": model, "devices": "cpu", "optim": {"lr": 1e-9}},
        "engine": {"devices": "cpu", "max_running": 256},
        "data": {"train": [{"kind": "jsonl", "path": str(folder / "train.jsonl")}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": rollout,
    }


async def take_part(work: Path, name: str) -> None:
    """The child: build the run, then take a step for each line that comes in."""
    from reroll_zoo import core_watch

    if name == DEFAULT:
        core_watch.CROWDED = math.inf  # Whatever the load, nobody acts on it.
    from reroll.config.load import parse_config
    from reroll.observe.progress import TrainView
    from reroll.observe.run_folder import RunFolder
    from reroll.observe.trackers import make_tracker
    from reroll.pipeline.base import RunContext
    from reroll.pipeline.rlvr import RlvrPipeline

    raw = json.loads((work / "config.json").read_text())
    raw["run"] |= {"name": name.replace(" ", "-").replace("'", ""), "runs_dir": str(work / "runs")}
    config = parse_config(raw)
    folder = RunFolder.create(config.run, resolved=config.model_dump(mode="json"), resume=False, overwrite=True)
    tracker = make_tracker([], folder, config={}, start_step=0)
    context = RunContext(folder, tracker, TrainView(1, name))
    async with RlvrPipeline.open(config, context) as pipeline:  # type: ignore[arg-type]
        await pipeline.start(0)
        _tell({name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))})
        for step, _ in enumerate(iter(sys.stdin.readline, "")):
            started = time.perf_counter()
            await pipeline.step(step)
            _tell({"seconds": time.perf_counter() - started})


def _tell(told: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
