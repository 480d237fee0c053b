"""Who learns faster at equal samples: TRL as it is, TRL with our loss and schedule, reroll in fp32, bf16, and with TRL's betas.

Every arm answers the same questions in the same order from the same model, under each seed: 16 prompts × 8 siblings a step.
A run is a process; `--jobs` of them share the device. A run's row is written to `--rows` when it ends, and a second call does
what is missing. After `--minutes` what still runs is ended. The table: each arm less the first, by pairs of seed and task.
`python benchmarks/learning_trl.py --model FOLDER --jobs 8 --minutes 9` on a GPU, several times;
`python benchmarks/learning_trl.py --device cpu --tasks sorting --seeds 2 --steps 4 --jobs 1` tries it with a small model that
is warmed up first (which stands in wherever no `--model` is given). TRL is looked for in `--trl-python`; without it its arms
are left out. Packages that PYTHONPATH adds must lie in a folder named site-packages: `datasets` pickles modules from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from learning_tasks import TASKS
from report import arguments, report

PEERS = Path(__file__).resolve().parent / "peers"
TRL_BETAS = [0.9, 0.999]
ARMS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "TRL, our loss": {
        "loss_type": "grpo",  # The mean of a sequence's tokens, then of the sequences.
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
    },
    "reroll fp32": {"precision": "fp32"},
    "reroll bf16": {"precision": "bf16"},
    "reroll bf16, TRL's betas": {"precision": "bf16", "optim": {"betas": TRL_BETAS}},
}
"""Fields of TRL's config, or of ours."""

Run = dict[str, Any]


def main() -> None:
    args = parsed()
    arms = [name for name in args.arms if not name.startswith("TRL") or has_trl(args.trl_python)]
    if left_out := sorted(set(args.arms) - set(arms)):
        print(f"left out, as {args.trl_python} has no trl: {', '.join(left_out)}")
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    model = args.model or warm_model(args)
    asked = [
        {"task": task, "seed": seed, "name": arm, "steps": args.steps, "lr": args.lr, "model": model, "device": args.device}
        for seed, task, arm in product(range(args.seeds), args.tasks, arms)  # A run that is cut off has whole seeds.
    ]
    done = {key_of(row): row for row in read_rows(args.rows)}
    run_all([each for each in asked if key_of(each) not in done], args)
    done |= {key_of(row): row for row in read_rows(args.rows)}
    rows = [done[key_of(each)] for each in asked if key_of(each) in done]
    if not rows:
        raise SystemExit("no run has ended")
    note = (
        f"{len(rows)} of {len(asked)} runs; {args.steps} steps at lr {args.lr:g}; intervals: 95 %, Student's t over the pairs"
    )
    report(
        "learning_trl",
        table(rows, arms),
        title=(__doc__ or "").splitlines()[0],
        note=note,
        facts={"runs": rows},
        save=args.save,
    )


def run_all(asked: Sequence[Run], args: argparse.Namespace) -> None:
    """As many at a time as `--jobs` says, until time is up; a row for each that ends."""
    ends_s = time.monotonic() + 60 * args.minutes
    with ThreadPoolExecutor(args.jobs) as pool:
        for ended in as_completed([pool.submit(run_one, each, args, ends_s=ends_s) for each in asked]):
            row = ended.result()
            told = f"{row['task']}, seed {row['seed']}, {row['name']}: "
            if "failed" in row:
                print(told + row["failed"], flush=True)
                continue
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{told}reward {row['reward']:.3f}, held out {row['held_out']:.3f}, {row['seconds']:.0f} s", flush=True)


def run_one(asked: Run, args: argparse.Namespace, *, ends_s: float) -> Run:
    """What came of a run, or why nothing did."""
    started_s = time.monotonic()
    wanted = asked | {"arm": ARMS[asked["name"]]}
    try:
        if asked["name"].startswith("TRL"):
            with tempfile.TemporaryDirectory() as out:
                found = told([args.trl_python, PEERS / "trl_learning.py"], wanted | {"out": out}, args, ends_s=ends_s)
                found |= told(ours("evaluate"), wanted | {"model": out, "arm": {}}, args, ends_s=ends_s)
        else:
            found = told(ours("train"), wanted, args, ends_s=ends_s)
    except (subprocess.TimeoutExpired, RuntimeError) as error:
        return asked | {"failed": "not done in time" if isinstance(error, subprocess.TimeoutExpired) else str(error)}
    reward = statistics.fmean(found["rewards"])
    return asked | found | {"reward": reward, "seconds": time.monotonic() - started_s}


def told(command: Sequence[str | Path], asked: Run, args: argparse.Namespace, *, ends_s: float) -> Run:
    """What a process printed after RESULT."""
    threads = str(max(1, (os.cpu_count() or 1) // args.jobs))
    left_s = max(0.0, ends_s - time.monotonic())
    if not left_s:
        raise subprocess.TimeoutExpired([str(command[0])], left_s)
    done = subprocess.run(
        [*map(str, command), json.dumps(asked)],
        env=os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=left_s,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: Run = json.loads(line.removeprefix("RESULT "))
            return found
    raise RuntimeError(f"failed\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def ours(verb: str) -> list[str | Path]:
    return [sys.executable, PEERS / "reroll_learning.py", verb]


def warm_model(args: argparse.Namespace) -> str:
    """Made once, beside the rows."""
    folder = args.rows.parent.resolve() / f"warm-{args.warm_steps}"
    if not folder.exists():
        print(f"warming up a small model in {folder}", flush=True)
        told(
            ours("warm"),
            {"out": str(folder), "steps": args.warm_steps, "device": args.device},
            args,
            ends_s=time.monotonic() + 600,
        )
    return str(folder)


def has_trl(python: str) -> bool:
    return subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0


def key_of(run: Run) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("task", "seed", "name", "steps", "lr", "model", "device"))


def read_rows(path: Path) -> list[Run]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Run], arms: Sequence[str]) -> list[dict[str, object]]:
    """For each task and for all, each arm and how far it is from the first."""
    by_arm = {arm: {(row["task"], row["seed"]): row for row in rows if row["name"] == arm} for arm in arms}
    base = by_arm[arms[0]]
    tasks = sorted({row["task"] for row in rows})
    lines: list[dict[str, object]] = []
    for task, arm in product((*tasks, "all"), arms):
        runs = {key: row for key, row in by_arm[arm].items() if task in (key[0], "all")}
        pairs = [(row, base[key]) for key, row in runs.items() if key in base and arm != arms[0]]
        line: dict[str, object] = {"task": task, "arm": arm, "runs": len(runs), "pairs": len(pairs)}
        for name in ("reward", "held_out"):
            line[name] = f"{statistics.fmean(row[name] for row in runs.values()):.3f}" if runs else "-"
            line[f"{name} less {arms[0]}"] = shown([ours[name] - theirs[name] for ours, theirs in pairs])
        lines.append(line)
    return lines


def shown(differences: Sequence[float]) -> str:
    """Their mean and its interval, of which two pairs are the least."""
    if not differences:
        return "-"
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f}"
    draws = np.random.default_rng(0).standard_t(len(differences) - 1, 1_000_000)
    half = float(np.quantile(draws, 0.975)) * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder, such as SmolLM2's; by default a small model is warmed up")
    parser.add_argument("--device", default="0", help="cpu, or the number of a GPU")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["sums", "products"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, help="default: 1e-5, or 4e-4 for the small model")
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-steps", type=int, default=200, help="of the small model's warm-up")
    parser.add_argument("--rows", type=Path, default=Path("runs/learning-trl/rows.jsonl"))
    parser.add_argument("--trl-python", default=sys.executable)
    args = parser.parse_args()
    args.device = args.device if args.device == "cpu" else int(args.device)
    args.lr = args.lr or (1e-5 if args.model else 4e-4)
    return args


if __name__ == "__main__":
    main()
