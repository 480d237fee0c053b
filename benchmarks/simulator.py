"""Whether the simulator is right, and how far it goes: predictions beside measurements; one controller at 8 to 16,384 GPUs.

`overlap` and `long_tail` predict those benchmarks; `run` has a tiny model play a game on this CPU at several staleness budgets
at the same time, learns from the folder of one and predicts the others;
`scale` grows the simulated cluster with its batch (weak scaling), on a clock that the controller's CPU time moves on; `full`
has engines that answer faster and faster, until it is what all wait for.
Run: python benchmarks/simulator.py overlap long_tail run scale full
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import long_tail
import overlap
import yaml
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll.rollout.play import stable_seed
from reroll_zoo.simulate.compare import Case, calibrated, run_case
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.recorded import RecordedRun, read_run
from reroll_zoo.simulate.run import Prediction, System
from reroll_zoo.simulate.workload import Drawn, Workload, fixed, parse_drawn
from reroll_zoo.tiny_models import make_tiny

MAX_GROUPS = 4096
WARM_STEPS = 4
GAMES: dict[str, dict[str, Any]] = {
    "game": {
        "envs": {"lake": {"env": {"kind": "import", "path": "lake:Lake"}, "actions": {"kind": "text"}}},
        "env_workers": {"kind": "inline"},
    },
    "slow game": {
        "envs": {
            "lake": {"env": {"kind": "import", "path": "lake:Lake", "options": {"wait_s": 1.0}}, "actions": {"kind": "text"}}
        },
    },
}
"""A move takes microseconds; or so long that a run waits for it."""
LAKE = """
import time
from reroll_zoo.games.frozen_lake import FrozenLake, FrozenLakeConfig

class Lake(FrozenLake):
    def __init__(self, wait_s=0.0):
        super().__init__(FrozenLakeConfig(size=4, max_steps=4, rules=False))
        self.wait_s = wait_s

    def step(self, action):
        time.sleep(self.wait_s)
        return super().step(action)
"""
LIMITS = {"max_prompt_tokens": 128, "max_tokens": 12, "max_total_tokens": 512}


class Listed(Drawn):
    """What a benchmark draws for each seed, so that both have the same samples."""

    def __init__(self, values: dict[int, float]) -> None:
        super().__init__(parse_drawn(f"uniform:0,{max(values.values())}", salt=0, name="").table)
        object.__setattr__(self, "values", values)

    def of(self, seed: int) -> float:
        values: dict[int, float] = self.values  # type: ignore[attr-defined]
        return values[seed]


def compared(name: str, measured_s: float, simulated_s: float) -> dict[str, Any]:
    return {
        "case": name,
        "measured_s": measured_s,
        "simulated_s": simulated_s,
        "off_by": f"{simulated_s / measured_s - 1:+.1%}",
    }


def overlap_rows(folder: Path) -> list[dict[str, Any]]:
    """Seconds of all steps at every staleness budget."""
    import random

    lengths: dict[int, float] = {}
    for number in range(MAX_GROUPS):
        for index in range(overlap.GROUP_SIZE):
            seed = stable_seed(0, number, index)
            drawn = min(overlap.MAX_TOKENS, overlap.MIN_TOKENS * random.Random(seed).paretovariate(1.2))
            lengths[stable_seed(seed, 0)] = drawn
    load = Workload(lengths=Listed(lengths), prompt_tokens=0, max_tokens=overlap.MAX_TOKENS)
    slots = overlap.PROMPTS_PER_STEP * overlap.GROUP_SIZE
    engine = EngineModel(decode_s=lambda num: overlap.SECONDS_PER_TOKEN, max_running=slots)
    rows = []
    alone_s, _ = asyncio.run(overlap.run(folder, max_staleness=0, train_s=0.0))
    train_s = alone_s / overlap.NUM_STEPS
    for max_staleness in (0, 1, 2, 4):
        wall_s, _ = asyncio.run(overlap.run(folder, max_staleness=max_staleness, train_s=train_s))
        rollout = RolloutConfig(
            prompts_per_step=overlap.PROMPTS_PER_STEP, group_size=overlap.GROUP_SIZE, max_staleness=max_staleness
        )
        system = System(engine=engine, engine_seats=(("0",),), policy_seats=(("1",),), train_s=train_s)
        outcome = run_case(Case("", rollout, load, system), num_steps=overlap.NUM_STEPS).outcome
        rows.append(compared(f"overlap, max_staleness {max_staleness}", wall_s, outcome.wall_s))
    return rows


def long_tail_rows() -> list[dict[str, Any]]:
    """Seconds until the slowest of 256 episodes with slow steps is over. What the controller takes for a turn is measured
    first: the same episodes, whose steps take no time."""
    rows = []
    num_turns = sum(len(long_tail.draw_latencies(seed, "none")) for seed in long_tail.seeds())
    turn_s = min(asyncio.run(long_tail.scheduled("none", slots=long_tail.NUM_EPISODES)) for _ in range(5)) / num_turns
    rollout = RolloutConfig(prompts_per_step=long_tail.NUM_PROMPTS, group_size=long_tail.GROUP_SIZE)
    engine = EngineModel(decode_s=lambda num: 1e-9, max_running=1 << 20)
    system = System(engine=engine, engine_seats=(("0",),), policy_seats=(("1",),), train_s=0.0)
    busy = replace(system, turn_s=turn_s)
    for tail, slots in long_tail.CASES:
        turns, latencies = {}, {}
        for seed in long_tail.seeds():
            drawn = long_tail.draw_latencies(seed, tail)
            turns[seed] = float(len(drawn))
            latencies |= {seed * 31 + left: latency for left, latency in enumerate(reversed(drawn))}
        load = Workload(
            lengths=fixed(1), prompt_tokens=0, max_tokens=1, turns=Listed(turns), env_s=Listed(latencies), env_slots=slots
        )
        free_s, simulated_s = (run_case(Case("", rollout, load, one), num_steps=1).outcome.wall_s for one in (system, busy))
        measured_s = min(asyncio.run(long_tail.scheduled(tail, slots=slots)) for _ in range(5))  # What others took is not ours.
        name = f"long_tail, {tail}, {slots} slots"
        rows.append(compared(f"{name}, a turn takes {1e6 * turn_s:.0f} us", measured_s, simulated_s))
        rows.append(compared(f"{name}, a turn takes nothing", measured_s, free_s))
    return rows


def prepare(folder: Path, game: str) -> None:
    folder.mkdir()
    (folder / "lake.py").write_text(LAKE)
    make_tiny(folder / "tiny", hidden=64, layers=2)
    tree = {
        "pipeline": "agentic",
        "algorithm": "grpo",
        "run": {"steps": 100_000},
        "policy": {"model": "tiny", "devices": "cpu", "optim": {"lr": 1e-6}},
        "engine": {"devices": "cpu", "max_running": 256},
        **GAMES[game],
        "data": {"train": [{"kind": "env", "domain": "lake", "num": 20000}]},
        "rollout": {"prompts_per_step": 4, "group_size": 4, **LIMITS},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))


def num_steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def end_group(process: subprocess.Popen[bytes]) -> None:
    """A run and whatever it started, at once: its folder is all that is wanted."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runs_side_by_side(folder: Path, asked: Sequence[int], seconds: float) -> dict[int, RecordedRun]:
    """Real runs of the game, one for each staleness budget, at the same time: what else this machine does they all feel alike.

    Only what they do after the last of them has warmed up counts, and until all are stopped together.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reroll", "train", "run.yaml"]
    with ExitStack() as stack:
        started = {}
        for budget in asked:
            log = stack.enter_context((folder / f"{budget}.log").open("w"))
            words = [f"run.name=budget-{budget}", f"rollout.max_staleness={budget}"]
            started[budget] = subprocess.Popen(  # A session each: Linux then gives each an equal share of a busy machine.
                [*command, *words], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(end_group, started[budget])
        folders = {budget: folder / "runs" / f"budget-{budget}" for budget in asked}
        while any(num_steps_of(run) < WARM_STEPS for run in folders.values()):
            ended = [budget for budget, process in started.items() if process.poll() is not None]
            if ended:
                raise RuntimeError((folder / f"{ended[0]}.log").read_text()[-2000:])
            time.sleep(0.5)
        before = {budget: num_steps_of(run) for budget, run in folders.items()}
        time.sleep(seconds)
        after = {budget: num_steps_of(run) for budget, run in folders.items()}
    return {budget: read_run(folders[budget], skip=before[budget], until=after[budget]) for budget in asked}


def run_rows(folder: Path, game: str, seconds: float) -> list[dict[str, Any]]:
    """Learn from one staleness budget, predict the others."""
    prepare(folder, game)
    runs = runs_side_by_side(folder, (0, 1, 3), seconds)
    rows = []
    for learned in runs:
        system, factor = calibrated(runs[learned])
        for asked in runs:
            rollout = runs[learned].config.rollout.model_copy(update={"max_staleness": asked})
            outcome = run_case(Case("", rollout, runs[learned].workload, system), num_steps=40).outcome
            name = f"{game}: max_staleness {asked}, from {learned} (x{factor:.2f}, sharing {system.sharing:.2f})"
            rows.append(compared(name, runs[asked].step_s, outcome.step_s))
    return rows


def grown(num_gpus: int, *, samples_per_gpu: int) -> Prediction:
    """Half of the GPUs generate, one engine each for 8; the batch grows with them."""
    num_engines = max(1, num_gpus // 16)
    engine = EngineModel(decode_s=lambda num: 0.008 + 0.00004 * num, prefill_s=2e-6, max_running=512, load_s=3.0)
    in_flight = num_gpus * samples_per_gpu
    rollout = RolloutConfig(prompts_per_step=max(1, in_flight // 16), group_size=8, max_staleness=1)
    load = Workload(lengths=parse_drawn("lognormal:1500,0.8", salt=1, name="", most=8192), prompt_tokens=512, max_tokens=8192)
    system = System(
        engine=engine,
        engine_seats=tuple((f"e{rank}",) for rank in range(num_engines)),
        policy_seats=(("p",),),
        train_s=0.0,
        train_token_s=60 / (samples_per_gpu / 2 * num_gpus * 1500),
        num_devices=num_gpus,
        is_charged=True,
    )
    return run_case(Case("", rollout, load, system), num_steps=4).outcome


def scale_rows(sizes: list[int], samples_per_gpu: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: Prediction | None = None
    for num_gpus in sizes:
        one = grown(num_gpus, samples_per_gpu=samples_per_gpu)
        first = first or one
        per_sample_s = one.controller_s / one.num_started
        rows.append(
            {
                "gpus": num_gpus,
                "in_flight": one.max_in_flight,
                "step_s": one.step_s,
                "samples_per_s": one.samples_per_s,
                "of_linear": f"{one.samples_per_s / num_gpus / (first.samples_per_s / sizes[0]):.1%}",
                "us_per_sample": 1e6 * per_sample_s,
                "models_us": 1e6 * one.models_s / one.num_started,
                "samples_per_cpu_s": 1 / per_sample_s,
                "controller_load": f"{one.samples_per_s * per_sample_s:.2%}",
            }
        )
    return rows


FULL_GPUS, FULL_STEPS = 64, 12
DECODE_S = (0.04, 0.02, 0.01, 0.005, 0.0025)
"""Of the engines of `full`: to twice what a controller of 10,000 samples a second takes."""


def hurried(decode_s: float, *, is_charged: bool) -> Prediction:
    """Short samples from engines of this speed, as many in flight as on so many GPUs, and a trainer that takes no time."""
    engine = EngineModel(decode_s=lambda num: decode_s, max_running=512)
    rollout = RolloutConfig(prompts_per_step=FULL_GPUS * 25 // 16, group_size=8, max_staleness=1)
    load = Workload(lengths=parse_drawn("uniform:10,20", salt=1, name=""), prompt_tokens=512, max_tokens=20)
    seats = tuple((f"e{rank}",) for rank in range(FULL_GPUS // 16))
    system = System(engine=engine, engine_seats=seats, policy_seats=(("p",),), train_s=0.0, is_charged=is_charged)
    return run_case(Case("", rollout, load, system), num_steps=FULL_STEPS).outcome


def full_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    per_gpu = grown(8, samples_per_gpu=25).samples_per_s / 8
    for decode_s in DECODE_S:
        asked, got = (hurried(decode_s, is_charged=is_charged) for is_charged in (False, True))
        rows.append(
            {
                "asked_per_s": asked.samples_per_s,
                "done_per_s": got.samples_per_s,
                "of_asked": f"{got.samples_per_s / asked.samples_per_s:.1%}",
                "us_per_sample": 1e6 * got.controller_s / got.num_started,
                "gpus_of_scale": got.samples_per_s / per_gpu,
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", default=["overlap", "long_tail", "run", "scale", "full"])
    parser.add_argument("--games", nargs="+", choices=list(GAMES), default=list(GAMES), help="for `run`")
    parser.add_argument("--seconds", type=float, default=90, help="of the real runs, after they have warmed up")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--samples-per-gpu", type=int, default=25, help="in flight: 25 make 409,600 on 16,384 GPUs")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += overlap_rows(Path(folder)) if "overlap" in given.parts else []
        rows += long_tail_rows() if "long_tail" in given.parts else []
        for index, game in enumerate(given.games if "run" in given.parts else ()):
            rows += run_rows(Path(folder) / str(index), game, given.seconds)
    if rows:
        report("simulator", rows, title="Predicted beside measured", note="measured beside other load", save=given.save)
    if "scale" in given.parts:
        report(
            "simulator_scale",
            scale_rows(given.gpus, given.samples_per_gpu),
            title="One controller, weak scaling",
            note="us_per_sample: CPU time of scheduler, router, token keeper, journal and event loop for each sample that was "
            "started, without that of the modelled engines (models_us); controller_load: the share of one core that it takes",
            save=given.save,
        )
    if "full" in given.parts:
        report(
            "simulator_full",
            full_rows(),
            title="One controller that has all it can do",
            note="asked: what engines would finish, were the controller infinitely fast; gpus_of_scale: that as many GPUs as "
            "`scale` has them finish",
            save=given.save,
        )


if __name__ == "__main__":
    main()
