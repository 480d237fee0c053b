"""What a run uses while it goes on for long: memory, handles and threads of its processes, files in shared memory.

A tiny asynchronous run in processes, of which workers are killed now and then; a judge fails for a while. The controller, the
policy and the first engine live on (unless `--roles` has the policy killed, too: then all but the controller start anew). What
grows and does not flatten is a leak: each quarter of the time has its medians, and the last column says what a thousand steps
of the second half added, by a straight line.
Run: python benchmarks/growth.py --minutes 60 [--roles env reward engine policy]
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from chaos import SCENARIOS, Run, tree_of
from chaos_faults import Judge, workers_of
from report import arguments, report

from reroll.observe.run_folder import RunFolder
from reroll_zoo.audit.run_audit import audit_run
from reroll_zoo.tiny_models import make_tiny

LOOK_EVERY_S = 5.0
NUM_PARTS = 4
SHARED_MEMORY = Path("/dev/shm")
WATCHED = ("controller", "policy", "engine", "env", "reward")
NEVER_ENDING = 10**6
"""Steps; it is left by Ctrl-C."""


class Look(NamedTuple):
    """A process, or what all leave in shared memory, at one time."""

    at_s: float
    step: int
    memory_mb: float
    """Of its own: pages that it shares with what it was forked from do not count until it writes to them."""
    handles: int
    threads: int


Looks = dict[tuple[str, int], list[Look]]
"""By role and process; of shared memory, under `files` and 0."""


def look(run: Run, looks: Looks, since_s: float) -> None:
    at_s, step = time.monotonic() - since_s, run.step
    for role, pids in workers_of(run.process.pid).items():
        for pid in pids:
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                memory, threads = (_number(status, name) for name in ("RssAnon", "Threads"))
                handles = len(os.listdir(f"/proc/{pid}/fd"))
                looks[role, pid].append(Look(at_s, step, memory / 1e3, handles, threads))
    files = [path for path in SHARED_MEMORY.rglob("*") if path.is_file()]
    size = 0
    for path in files:
        with suppress(OSError):
            size += path.stat().st_size
    looks["shared memory", 0].append(Look(at_s, step, size / 1e6, len(files), 0))


def _number(status: Sequence[str], name: str) -> int:
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:"))


def disturb(run: Run, judge: Judge, roles: Sequence[str], rng: random.Random) -> str:
    """Kill the last worker of a role, or have the judge fail."""
    role = rng.choice([*roles, "judge"])
    if role == "judge":
        judge.misbehave(rng)
    elif pids := run.workers(role):
        with suppress(ProcessLookupError):
            os.kill(max(pids), signal.SIGKILL)
    return role


def rows_of(looks: Looks) -> Iterator[dict[str, Any]]:
    """Of each role the process that was seen longest, and each quantity."""
    for role in [*WATCHED, "shared memory"]:
        lives = [life for (name, _), life in looks.items() if name == role]
        life = max(lives, key=len, default=[])
        if len(life) < 2 * NUM_PARTS:
            continue
        for name in ("memory_mb", "handles", "threads"):
            values = [float(getattr(look, name)) for look in life]
            if any(values):
                size = len(values) // NUM_PARTS
                parts = [statistics.median(values[part * size : (part + 1) * size]) for part in range(NUM_PARTS)]
                half = life[len(life) // 2 :]
                row = {"what": f"{role}: {name}", "lives": len(lives), "minutes": round((life[-1].at_s - life[0].at_s) / 60, 1)}
                row |= {f"part_{number + 1}": round(value, 1) for number, value in enumerate(parts)}
                yield row | {"by_1000_steps": _slope([look.step for look in half], values[len(life) // 2 :])}


def _slope(steps: Sequence[int], values: Sequence[float]) -> float | None:
    if len(set(steps)) < 2:
        return None
    return round(1000 * statistics.linear_regression(steps, values).slope, 2)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--fault-every", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--roles", nargs="*", default=["env", "reward", "engine"], choices=WATCHED[1:])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder, rng = Path(tempfile.mkdtemp(prefix="reroll-growth-")), random.Random(options.seed)
    model, judge = make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3), Judge()
    tree = tree_of(SCENARIOS["processes-async"], folder, model=model, judge=judge.url, num_steps=NEVER_ENDING)
    looks: Looks = defaultdict(list)
    run, struck = Run(tree, folder), Counter[str]()
    since_s = next_s = time.monotonic()
    try:
        while time.monotonic() - since_s < 60 * options.minutes and not run.is_over:
            time.sleep(LOOK_EVERY_S)
            look(run, looks, since_s)
            if run.step and time.monotonic() >= next_s:
                struck[disturb(run, judge, options.roles, rng)] += 1
                next_s = time.monotonic() + options.fault_every
        run.process.send_signal(signal.SIGINT)
        code = run.wait()
    finally:
        run.end()
        judge.close()
    left, found = run.left_behind(), audit_run(RunFolder(run.path))
    facts = {"steps": run.step, "faults": dict(struck), "exit_code": code, "violations": found.violations, "left_behind": left}
    facts |= {"journal_mb": round(sum(path.stat().st_size for path in (run.path / "journal").iterdir()) / 1e6, 1)}
    report("growth", list(rows_of(looks)), title=f"what a run of {run.step} steps used", facts=facts, save=options.save)
    print(facts)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
