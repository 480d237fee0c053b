"""What the loss of a controller costs: three runs side by side, one undisturbed, two whose controller is killed now and then.

Of these one has what makes a restart quick (the spare loads what workers are forked from, replicas in memory), the other has
neither. A reward that takes its time bounds all three, not the cores that they share. A kill comes when the run is under way
and its spare has loaded what it will. Stages: where the time from each kill to the next finished step went.
Run: python benchmarks/healing.py [--kills 4] [--every-steps 40] [--save]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from report import arguments, report

from reroll_zoo.forks.forks import children
from reroll_zoo.supervisor import SPARE
from reroll_zoo.tiny_models import make_tiny

REWARD_S = 0.5
"""What a step waits for, whoever else needs the cores."""
SETTLED_S = 3.0
"""A spare that has used no core for so long has loaded what it will."""
GROUPS = 4
REWARD = f"""
import time

def slow(prompt, trajectory):
    time.sleep({REWARD_S} / 2)
    return float(trajectory.num_completion_tokens % 2)
"""
RUNNER = """
import functools, json, os, sys, time

def told(stage):
    with open("stages.jsonl", "a") as file:
        file.write(json.dumps([time.time(), os.getpid(), stage]) + "\\n")

def telling(module, name, stage):
    inner = getattr(module, name)
    def outer(*args, **kwargs):
        told(stage)
        return inner(*args, **kwargs)
    setattr(module, name, functools.wraps(inner)(outer))

from reroll.pipeline.restarts import Restarts
from reroll_zoo import supervisor
supervisor.SPARE_AFTER_S = 0
if sys.argv.pop(1) == "plain":
    supervisor.start_as_in = lambda pid: None
telling(Restarts, "again", "pause")
import reroll.cli as cli
load_config = cli.load_config
def loaded(*args):
    told("load, check")
    import reroll.pipeline.run as run, reroll.pipeline.build as build, reroll.pipeline.rlvr as rlvr
    if not hasattr(run, "is_told"):
        run.is_told = True
        telling(run, "look_back", "look back")
        telling(build, "open_episode_runner", "spawn engine")
        telling(build, "_policy", "spawn policy")
        telling(run.TrainLoop, "_resume", "resume")
        telling(rlvr.RlvrPipeline, "start", "first push")
        telling(rlvr.RlvrPipeline, "step", "step")
    return load_config(*args)
cli.load_config = loaded
cli.main()
"""


class Side:
    """One of the runs."""

    def __init__(self, name: str, folder: Path, *, model: Path, is_quick: bool) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        (folder / "slow_reward.py").write_text(REWARD)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {digit}"}) + "\n" for digit in range(10)))
        (folder / "run.yaml").write_text(yaml.safe_dump(tree_of(folder, model, replica_share=0.01 if is_quick else 0.0)))
        command = [sys.executable, "-c", RUNNER, "quick" if is_quick else "plain", "train", "run.yaml"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (folder / "out.txt").open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        self.heals: list[dict[str, float]] = []
        self.trained_again = 0
        self.since_s, self.since_step = 0.0, 0

    @property
    def step(self) -> int:
        """The last that is finished."""
        with suppress(OSError):
            for line in reversed((self.folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()):
                with suppress(ValueError):  # In the midst of being written.
                    row = json.loads(line)
                    if "reward/mean" in row:
                        return int(row["step"])
        return 0

    def wait_for(self, step: int) -> None:
        while self.step < step:
            assert self.process.poll() is None, (self.folder / "out.txt").read_text()[-2000:]
            time.sleep(0.05)

    def wait_for_spare(self) -> None:
        """Until it has loaded what it will."""
        used, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < SETTLED_S:
            time.sleep(0.2)
            spares = [pid for pid in children(self.process.pid) if _name(pid) == SPARE]
            now = sum(_ticks(pid) for spare in spares for pid in (spare, *children(spare)))
            if now == 0 or now - used > 1:
                used, since_s = now, time.monotonic()

    def strike(self) -> None:
        """Kill its controller, and see where the time goes until it is further than before."""
        self.wait_for_spare()
        reached, killed_s = self.step, time.time()
        os.kill(children(self.process.pid)[0], signal.SIGKILL)
        self.wait_for(reached + 1)
        healed_s = time.time()
        rows = [json.loads(line) for line in (self.folder / "stages.jsonl").read_text().splitlines()]
        rows = [(at_s, stage) for at_s, _, stage in rows if killed_s < at_s < healed_s]
        first_step = next(number for number, (_, stage) in enumerate(rows) if stage == "step")
        stages = [(killed_s, "notice"), *rows[: first_step + 1]]
        ends = [at_s for at_s, _ in stages[1:]] + [healed_s]
        times = {"total": healed_s - killed_s}
        for (begin_s, stage), end_s in zip(stages, ends, strict=True):
            times[stage] = times.get(stage, 0.0) + end_s - begin_s
        self.heals.append(times)
        self.trained_again += sum(stage == "step" for _, stage in rows) - 1

    def begin(self) -> None:
        """Count steps from now on."""
        self.since_s, self.since_step = time.monotonic(), self.step

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def tree_of(folder: Path, model: Path, *, replica_share: float) -> dict[str, Any]:
    return {
        "pipeline": "rlvr",
        "run": {"runs_dir": str(folder / "runs"), "steps": 10**6, "seed": 1},
        "runtime": {"kind": "processes"},
        "policy": {"model": str(model), "devices": "cpu", "optim": {"lr": 1e-6}},
        "engine": {"devices": "cpu"},
        "data": {"train": [{"kind": "jsonl", "path": str(folder / "rows.jsonl")}]},
        "rewards": {"default": {"kind": "import", "path": "slow_reward:slow"}},
        "reward_workers": {"num_processes": 1},
        "rollout": {"prompts_per_step": GROUPS, "group_size": 2, "max_prompt_tokens": 64, "max_tokens": 8, "max_staleness": 1},
        "checkpoint": {"every": 100, "replica_share": replica_share},
    }


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _ticks(pid: int) -> int:
    """Of a core, that a process has used."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def race(folder: Path, *, num_kills: int, every_steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each stage, and what was found of each run."""
    model = make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)
    names = {"undisturbed": True, "plain": False, "quick": True}
    sides = [Side(name, folder / name, model=model, is_quick=is_quick) for name, is_quick in names.items()]
    calm, struck = sides[0], sides[1:]
    try:
        for side in sides:
            side.wait_for(5)
        for side in struck:
            side.wait_for_spare()
        for side in sides:
            side.begin()
        with ThreadPoolExecutor(len(struck)) as threads:
            for number in range(num_kills):
                calm.wait_for(calm.since_step + (number + 1) * every_steps)
                list(threads.map(Side.strike, struck))
                print(f"{number + 1}: " + ", ".join(f"{s.name} {s.heals[-1]['total']:.1f} s" for s in struck), flush=True)
        took_s = [(side.step - side.since_step) / (time.monotonic() - side.since_s) for side in sides]
    finally:
        for side in sides:
            side.end()
    stages = list(dict.fromkeys(stage for side in struck for heal in side.heals for stage in heal))
    medians = {
        side.name: {name: statistics.median(heal.get(name, 0.0) for heal in side.heals) for name in stages} for side in struck
    }
    base = medians["plain"]["total"]
    rows = [{"stage": stage} | {name: round(found[stage] / base, 3) for name, found in medians.items()} for stage in stages]
    facts = {
        "share_of_undisturbed_steps": {side.name: round(rate / took_s[0], 3) for side, rate in zip(sides, took_s, strict=True)},
        "steps_trained_again": {side.name: side.trained_again for side in struck},
        "kills": num_kills,
        "seconds_of_the_plain_restart": round(base, 1),
        "load": round(os.getloadavg()[1], 1),
    }
    return rows, facts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every-steps", type=int, default=40, help="of the undisturbed run, between two kills")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="reroll-healing-"))
    rows, facts = race(folder, num_kills=options.kills, every_steps=options.every_steps)
    print(facts)
    title = "a killed controller, as shares of the plain restart"
    report("healing", rows, title=title, save=options.save, note="medians", facts=facts)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
