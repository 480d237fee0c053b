"""Whether the simulator is right, and how far it goes: predictions beside measurements; one controller at 8 to 4,096 GPUs.

`overlap` and `long_tail` predict those benchmarks; `run` trains a tiny model asynchronously on this CPU, learns from the
journal of one setting and predicts another; `scale` grows the simulated cluster with its batch (weak scaling).
Run: python benchmarks/simulator.py overlap long_tail run scale
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import long_tail
import overlap
import yaml
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll.models.tiny import make_tiny
from reroll.rollout.seeds import stable_seed
from reroll_zoo.simulate.compare import Case, calibrated, run_case
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.recorded import read_run
from reroll_zoo.simulate.run import Outcome, System
from reroll_zoo.simulate.workload import Drawn, Workload, fixed, parse_drawn

MAX_GROUPS = 4096


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
    """Seconds until the slowest of 256 episodes with slow steps is over."""
    rows = []
    rollout = RolloutConfig(prompts_per_step=long_tail.NUM_PROMPTS, group_size=long_tail.GROUP_SIZE)
    engine = EngineModel(decode_s=lambda num: 1e-9, max_running=1 << 20)
    system = System(engine=engine, engine_seats=(("0",),), policy_seats=(("1",),), train_s=0.0)
    for tail, slots in long_tail.CASES:
        turns, latencies = {}, {}
        for seed in long_tail.seeds():
            drawn = long_tail.draw_latencies(seed, tail)
            turns[seed] = float(len(drawn))
            latencies |= {seed * 31 + left: latency for left, latency in enumerate(reversed(drawn))}
        load = Workload(
            lengths=fixed(1), prompt_tokens=0, max_tokens=1, turns=Listed(turns), env_s=Listed(latencies), env_slots=slots
        )
        simulated_s = run_case(Case("", rollout, load, system), num_steps=1).outcome.wall_s
        measured_s = min(asyncio.run(long_tail.scheduled(tail, slots=slots)) for _ in range(5))  # What others took is not ours.
        rows.append(compared(f"long_tail, {tail}, {slots} slots", measured_s, simulated_s))
    return rows


def real_run(folder: Path, name: str, *words: str) -> Path:
    """A run of the tiny model on this CPU, its first steps in the past."""
    run = subprocess.run(
        [sys.executable, "-m", "reroll", "train", "run.yaml", f"run.name={name}", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return folder / "runs" / name


def prepare(folder: Path, steps: int) -> None:
    make_tiny(folder / "tiny", hidden=128, layers=4)
    lines = [json.dumps({"prompt": f"{number:04d}=", "answer": f"{number:04d}"}) for number in range(500)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    tree = {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "run": {"steps": steps},
        "policy": {"model": "tiny", "devices": "cpu", "optim": {"lr": 1e-6}},
        "engine": {"devices": "cpu", "max_running": 64},
        "data": {"train": [{"kind": "jsonl", "path": "train.jsonl"}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_prompt_tokens": 32, "max_tokens": 48},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))


def run_rows(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Learn from one staleness budget, predict another; beside them the same again, to see what this machine varies."""
    prepare(folder, steps)
    rows = []
    for learned, asked in ((1, 0), (1, 3)):
        before = read_run(real_run(folder, f"{learned}-{asked}-a", f"rollout.max_staleness={learned}"))
        other = read_run(real_run(folder, f"{learned}-{asked}-b", f"rollout.max_staleness={asked}"))
        after = read_run(real_run(folder, f"{learned}-{asked}-c", f"rollout.max_staleness={learned}"))
        rollout = before.config.rollout.model_copy(update={"max_staleness": asked})
        predicted = [
            run_case(Case("", rollout, one.workload, calibrated(one)[0]), num_steps=40).outcome.step_s
            for one in (before, after)
        ]
        row = compared(f"CPU run: from {learned}, max_staleness {asked}", other.step_s, sum(predicted) / 2)
        rows.append(row)
        rows.append(compared(f"  the learned run itself, twice (noise), {learned}", before.step_s, after.step_s))
    return rows


def grown(num_gpus: int, *, samples_per_gpu: int) -> Outcome:
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
    )
    return run_case(Case("", rollout, load, replace(system)), num_steps=4).outcome


def scale_rows(sizes: list[int], samples_per_gpu: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: Outcome | None = None
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
                "samples_per_cpu_s": 1 / per_sample_s,
                "controller_load": f"{one.samples_per_s * per_sample_s:.2%}",
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", default=["overlap", "long_tail", "run", "scale"])
    parser.add_argument("--steps", type=int, default=40, help="of the real runs")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--samples-per-gpu", type=int, default=25, help="in flight: 25 make 102,400 on 4,096 GPUs")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += overlap_rows(Path(folder)) if "overlap" in given.parts else []
        rows += long_tail_rows() if "long_tail" in given.parts else []
        rows += run_rows(Path(folder), given.steps) if "run" in given.parts else []
    if rows:
        report("simulator", rows, title="Predicted beside measured", note="measured beside other load", save=given.save)
    if "scale" in given.parts:
        report(
            "simulator_scale",
            scale_rows(given.gpus, given.samples_per_gpu),
            title="One controller, weak scaling",
            note="us_per_sample: CPU time of the simulation, modelled engines included, for each sample that was started: "
            "scheduler, router, token keeper, journal; controller_load is the share of one core that the simulated run needs",
            save=given.save,
        )


if __name__ == "__main__":
    main()
