"""Samples per hour of a run that is struck once a minute, against the same run that nobody disturbs, both at the same time.

A judge that takes its time bounds both, not the cores that they share. The policy hardly learns, so that lengths and rewards
of what both train on can be compared, by two-sample tests of means and of shapes; the undisturbed controller tells whether
memory and handles grow.
Run: python benchmarks/chaos_rate.py --minutes 25 [--kind processes-async] [--seed 0] [--save]
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from chaos import SCENARIOS, Harness, Run, Scenario, Struck, Verdict, tree_of
from chaos_disk import own_disk
from chaos_faults import DISK, FULL, Judge
from chaos_use import UseLog, use_over_time
from report import arguments, report
from two_sample import ks_p_value, p_value

from reroll.observe.journal import SampleState, read_stored
from reroll_zoo.audit.audit import audit, counted_events
from reroll_zoo.tiny_models import make_tiny

EVERY_S = 60.0
"""Between two faults."""
JUDGE_S = 3.0
"""What the judge takes for an answer: with a budget of two stale versions there is a step every second."""
WARM_UP_STEPS = 5
DISK_MB = 512
SAMPLES_PER_STEP = 6
KINDS = [name for name, scenario in SCENARIOS.items() if not scenario.on_other_node]


class Side:
    """One of the two runs, with a judge of its own."""

    def __init__(self, scenario: Scenario, folder: Path, stack: ExitStack, *, model: Path, seed: int) -> None:
        self.scenario, self.judge = scenario, Judge(takes_s=JUDGE_S)
        stack.callback(self.judge.close)
        tree = tree_of(scenario, folder, model=model, judge=self.judge.url, num_steps=10**6)
        tree["run"]["seed"] = seed
        tree["policy"]["optim"] = {"lr": 1e-9}
        self.run = Run(tree, folder)
        stack.callback(self.run.end)
        self.log = stack.enter_context(UseLog(lambda: self.run.workers("controller"), lambda: self.run.step))
        self.since_s, self.since_step = 0.0, 0

    def begin(self) -> None:
        """Count from now on."""
        self.since_s, self.since_step = time.monotonic(), self.run.step

    def row(self, name: str) -> dict[str, Any]:
        """What it has done since."""
        seconds, num_steps = time.monotonic() - self.since_s, self.run.step - self.since_step
        found = audit(self.run.path / "journal", max_staleness=self.scenario.max_staleness)
        return {
            "run": name,
            "seconds": round(seconds),
            "samples": num_steps * SAMPLES_PER_STEP,
            "samples_per_hour": round(num_steps * SAMPLES_PER_STEP / seconds * 3600),
            "restarts": found.num_lives - 1,
            "trained_again": found.undone,
            "violations": len(found.violations),
            **use_over_time(self.log.lives),
        }

    def groups(self, *, until_step: int) -> Iterator[tuple[float, float]]:
        """The mean length and reward of each group that was trained up to a step."""
        ended: dict[str, tuple[float, float]] = {}
        trained: dict[int, list[tuple[float, float]]] = {}
        for event in counted_events(self.run.path / "journal"):
            if event.state is SampleState.DONE and (sample := read_stored(event, text_of=lambda ids: "")):
                ended[event.sample_id] = sample.num_completion_tokens, event.detail["reward"]
            elif event.state is SampleState.TRAINED and event.detail["version"] <= until_step and event.sample_id in ended:
                trained.setdefault(event.group, []).append(ended.pop(event.sample_id))
        for samples in trained.values():
            yield float(np.mean([length for length, _ in samples])), float(np.mean([reward for _, reward in samples]))


def race(scenario: Scenario, seed: int, *, num_faults: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each run, and what else was found."""
    rng, verdict = random.Random(seed), Verdict(scenario.name, seed, 0)
    model = make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)
    (folder / "calm").mkdir()
    with ExitStack() as stack:
        disk = stack.enter_context(own_disk(folder / "disturbed", size_mb=DISK_MB))
        sides = [
            Side(scenario, place, stack, model=model, seed=seed + number)
            for number, place in enumerate((folder / "calm", disk.path))
        ]
        calm, disturbed = sides
        while any(side.run.step < WARM_UP_STEPS for side in sides):
            time.sleep(0.2)
        for side in sides:
            side.begin()
        harness = Harness(disturbed.run, disturbed.judge, disk, None, verdict, rng)
        # After a full disk a person resumes: how soon is not the run's to say.
        faults = [fault for fault in scenario.faults if fault != (DISK, FULL) and (fault[0] != DISK or disk.can_be_slow)]
        for number, (kind, role) in enumerate(rng.choices(faults, k=num_faults)):
            struck = Struck(kind, role, disturbed.run.step)
            if not disturbed.run.is_over and harness.strike(struck):
                verdict.faults.append(struck)
            print(f"{number + 1}: {kind} {role}; steps {calm.run.step} and {disturbed.run.step}", flush=True)
            time.sleep(max(0.0, calm.since_s + (number + 1) * EVERY_S - time.monotonic()))
        rows = [calm.row("undisturbed"), disturbed.row("a fault a minute")]
        until_step = min(side.run.step for side in sides)
        drawn = np.random.default_rng(seed)
        found = [list(zip(*side.groups(until_step=until_step), strict=True)) for side in sides]
        pairs = list(zip(*found, strict=True))
        of_means = [round(p_value(*both, rng=drawn), 3) for both in pairs]
        of_shapes = [round(ks_p_value(*both, rng=drawn), 3) for both in pairs]
        facts = {
            "runs": scenario.name,
            "share_of_undisturbed": round(rows[1]["samples"] / rows[0]["samples"], 3),
            "p_value_of_lengths": of_means[0],
            "p_value_of_rewards": of_means[1],
            "ks_p_value_of_lengths": of_shapes[0],
            "ks_p_value_of_rewards": of_shapes[1],
            "groups_compared": [len(side[0]) for side in found],
            "means": [[round(float(np.mean(values)), 4) for values in side] for side in found],
            "last_words": [line for _, line in disturbed.run.lines[-3:]] if disturbed.run.is_over else [],
            "faults": [f"{fault.kind} {fault.role}".strip() for fault in verdict.faults],
        }
    return rows, facts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=int, default=10, help="one fault in each")
    parser.add_argument("--kind", choices=KINDS, default="processes-async")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="reroll-chaos-"))
    rows, facts = race(SCENARIOS[options.kind], options.seed, num_faults=options.minutes, folder=folder)
    print(facts)
    report("chaos_rate", rows, title="one fault a minute", save=options.save, facts=facts)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
