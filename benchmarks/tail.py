"""What a heavy tail of lengths costs, on a virtual clock: lock-step, synchronous steps, long rounds, staleness budgets.

64 samples a GPU and step, in groups of 8; the longest of a step is about 28 times the median, as in the RollPacker paper
(25 to 32), and a prompt's samples are alike. All GPUs generate and train in turns, or one generates and the others train. The
scheduler is the production one; engines, trainer and scores are modelled after a model of 14B on H100s. Each setting stands
beside its bound: the same work, done by engines that are always full and a trainer that never waits. Machine and load change
no result.
Run: python benchmarks/tail.py --save
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np
from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll_zoo.simulate.compare import Case, run_case
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.run import System
from reroll_zoo.simulate.workload import TABLE_SIZE, Drawn, Workload

NUM_GPUS, PROMPTS, GROUP_SIZE = 4, 32, 8
MEDIAN_TOKENS, MOST_TOKENS, PROMPT_TOKENS = 1024, 32768, 256
SIGMA = 1.2
"""Of the log-normal lengths."""
ENGINE = EngineModel(decode_s=lambda num: 0.012 + 6e-5 * num, prefill_s=2e-5, max_running=128, load_s=1.0)
GPU_TOKEN_S = 6e-4
"""That a GPU trains on one token: old log-probs, reference and update of 14B parameters at a quarter of an H100's peak."""
TRAIN_S = MOVE_S = 1.0
BUDGETS = (1, 2, 4, 6)
TITLE = f"{PROMPTS} prompts × {GROUP_SIZE} samples a step, longest {MOST_TOKENS:,} tokens, on {NUM_GPUS} simulated GPUs"


@dataclass(frozen=True)
class Setting:
    """One way to run a step."""

    name: str
    rollout: dict[str, Any] = field(default_factory=dict)
    num_engines: int | None = None
    """GPUs that only generate; None: all generate and train in turns."""
    is_lock_step: bool = False
    num_steps: int = 32

    def system(self) -> System:
        """The machines."""
        if self.num_engines is None:
            seats = tuple((f"gpu{rank}",) for rank in range(NUM_GPUS))
            return _system(replace(ENGINE, move_s=MOVE_S), seats, seats, scores_together=self.is_lock_step)
        seats = tuple((f"gpu{rank}",) for rank in range(NUM_GPUS))
        return _system(ENGINE, seats[: self.num_engines], seats[self.num_engines :])

    def bound_s(self, num_tokens: float) -> float:
        """Of a step that trains on so many tokens: all of its work at full speed."""
        system = self.system()
        generate_s = num_tokens * ENGINE.decode_s(ENGINE.max_running) / ENGINE.max_running
        generate_s = (generate_s + PROMPTS * PROMPT_TOKENS * ENGINE.prefill_s) / len(system.engine_seats)
        train_s = TRAIN_S + (num_tokens + PROMPTS * PROMPT_TOKENS) * system.train_token_s
        if self.num_engines is None:
            return generate_s + train_s + ENGINE.load_s + 2 * MOVE_S
        return max(generate_s, train_s) + ENGINE.load_s


def _system(engine: EngineModel, engines: Sequence[tuple[str]], trainers: Sequence[tuple[str]], **more: Any) -> System:
    return System(
        engine=engine,
        engine_seats=tuple(engines),
        policy_seats=tuple(trainers),
        train_s=TRAIN_S,
        train_token_s=GPU_TOKEN_S / len(trainers),
        num_devices=NUM_GPUS,
        **more,
    )


def workload(seed: int) -> Workload:
    """Half of the spread of lengths is the prompt's, half the sample's. Scores are those of programs that are run."""
    rng = np.random.default_rng(seed)
    part = SIGMA * math.sqrt(0.5)
    return Workload(
        lengths=Drawn(MEDIAN_TOKENS * rng.lognormal(0, part, TABLE_SIZE), salt=1),
        prompt_factors=Drawn(rng.lognormal(0, part, TABLE_SIZE), salt=2),
        score_s=Drawn(np.minimum(60, rng.lognormal(0.6, 1.0, TABLE_SIZE)), salt=3),
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MOST_TOKENS,
    )


def settings() -> list[Setting]:
    """What is compared, lock-step first."""
    long = {"long_rounds": True, "oversample": 1.25}
    found = [
        Setting("lock-step", is_lock_step=True),
        Setting("synchronous"),
        Setting("oversample 1.25", {"oversample": 1.25}, num_steps=48),
        Setting("long rounds, max_tries 2", {**long, "max_tries": 2}, num_steps=48),
        Setting("long rounds", long, num_steps=64),
        Setting("long rounds, 1.5, max_tries 4", {**long, "oversample": 1.5, "max_tries": 4}, num_steps=80),
    ]
    for budget, window in ((1, 2), (3, 4), (6, 7)):
        found.append(Setting("in turns", {"max_staleness": budget, "take_window": window}))
    engines = min(range(1, NUM_GPUS), key=lambda num: Setting("", num_engines=num).bound_s(2e6))
    for budget in BUDGETS:
        for window in sorted({1, budget + 1} if budget > 2 else {budget + 1}):
            found.append(Setting("apart", {"max_staleness": budget, "take_window": window}, num_engines=engines))
    return found


def measure(setting: Setting, seed: int) -> dict[str, float]:
    """One simulated run. Speed counts tokens, not steps: a setting that takes short samples first gains nothing by it."""
    rollout = RolloutConfig(prompts_per_step=PROMPTS, group_size=GROUP_SIZE, **setting.rollout)
    case = Case(setting.name, rollout, workload(seed), setting.system())
    outcome = run_case(case, num_steps=setting.num_steps, seed=seed).outcome
    step_s, num_tokens = outcome.step_s, outcome.mean("tokens")
    return {
        "step_s": step_s,
        "tokens_per_s": num_tokens / step_s,
        "of_bound": setting.bound_s(num_tokens) / step_s,
        "wasted": outcome.wasted_tokens / outcome.written_tokens,
        "stale": outcome.mean_staleness,
    }


def _measure_one(pair: tuple[Setting, int]) -> dict[str, float]:
    return measure(*pair)


def row_of(setting: Setting, runs: Sequence[dict[str, float]], base: dict[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Means over the seeds; ratios are of runs with the same seed."""
    mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    gains = {
        name: [run["tokens_per_s"] / other["tokens_per_s"] for run, other in zip(runs, others, strict=True)]
        for name, others in base.items()
    }
    return {
        "setting": setting.name,
        "gpus": f"{setting.num_engines}+{NUM_GPUS - setting.num_engines}" if setting.num_engines else f"{NUM_GPUS}",
        "max_staleness": setting.rollout.get("max_staleness", 0),
        "take_window": setting.rollout.get("take_window", 1),
        "step_s": mean["step_s"],
        **{f"x_{name}": statistics.fmean(values) for name, values in gains.items()},
        "least": min(gains["lock_step"]),
        "most": max(gains["lock_step"]),
        "of_bound": mean["of_bound"],
        "wasted": mean["wasted"],
        "stale": mean["stale"],
    }


def note(num_seeds: int) -> str:
    """What the numbers are."""
    return f"simulated time, means of {num_seeds} seeds; x_…: tokens trained on a second over that; least, most: of x_lock_step"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="simulations at the same time: the results do not depend on it")
    parser.add_argument("--only", default="", help="settings whose name has this")
    given = parser.parse_args()
    chosen = [one for one in settings() if given.only in one.name or one.name in ("lock-step", "synchronous")]
    seeds = range(given.seeds)
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(_measure_one, product(chosen, seeds)))
    runs = [outcomes[start : start + len(seeds)] for start in range(0, len(outcomes), len(seeds))]
    rows = [
        row_of(setting, mine, {"lock_step": runs[0], "synchronous": runs[1]})
        for setting, mine in zip(chosen, runs, strict=True)
    ]
    report(
        "tail",
        rows,
        title=TITLE,
        note=note(len(seeds)),
        save=given.save,
    )


if __name__ == "__main__":
    main()
