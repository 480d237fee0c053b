"""Whether the rate of a run follows engines that join in its midst: beside runs that had as many from the beginning.

The engines are modelled; scheduler, router, admission, journal and the loop that has engines join are the run's own, on a
virtual clock. A run begins with two engines. After a minute there is room for more: they start (30 s), get weights with the
next push, and serve. The rate is that of the last steps.
Run: python benchmarks/elastic.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from report import arguments, report

from reroll.config.parts import RolloutConfig
from reroll_zoo.audit.audit import audit
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.run import Prediction, System, simulate
from reroll_zoo.simulate.workload import Workload, parse_drawn

NUM_STEPS, NUM_LAST = 60, 30
NUM_FIRST = 2
JOINS_AT_S = 60.0
MAX_TOKENS = 2000
ENGINE = EngineModel(decode_s=lambda num: 0.02 + 0.0001 * num, max_running=32, load_s=0.5, restart_s=30.0)
WORKLOAD = Workload(
    lengths=parse_drawn("pareto:200,1.2", salt=1, name="lengths", most=MAX_TOKENS), prompt_tokens=32, max_tokens=MAX_TOKENS
)


def play(num_engines: int, *, num_joining: int = 0, max_staleness: int) -> Prediction:
    rollout = RolloutConfig(prompts_per_step=32, group_size=8, max_staleness=max_staleness)
    system = System(
        engine=ENGINE,
        engine_seats=tuple((str(rank),) for rank in range(num_engines)),
        policy_seats=(("policy",),),
        train_s=5.0,
        joins=((JOINS_AT_S, num_joining),) if num_joining else (),
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = simulate(rollout, WORKLOAD, system, num_steps=NUM_STEPS, folder=Path(folder))
        found = audit(Path(folder) / "journal", max_staleness=max_staleness)
        assert not found.violations, found.violations
    return outcome


def rate(outcome: Prediction) -> float:
    last = outcome.steps[-NUM_LAST:]
    return sum(step.tokens for step in last) / sum(step.step_s for step in last)


def rows() -> list[dict[str, Any]]:
    found = []
    for max_staleness in (0, 2):
        before = rate(play(NUM_FIRST, max_staleness=max_staleness))
        for num in (4, 8):
            joined = play(NUM_FIRST, num_joining=num - NUM_FIRST, max_staleness=max_staleness)
            at_once = play(num, max_staleness=max_staleness)
            found.append(
                {
                    "max_staleness": max_staleness,
                    "engines": f"{NUM_FIRST} to {num}",
                    "rate_to_before": round(rate(joined) / before, 2),
                    "had_from_the_beginning": round(rate(at_once) / before, 2),
                    "ratio": round(rate(joined) / rate(at_once), 3),
                    "busy_of_the_first": round(joined.engine_busy[0], 2),
                    "busy_of_the_last": round(joined.engine_busy[-1], 2),
                }
            )
    return found


def main() -> None:
    given = arguments(__doc__).parse_args()
    note = "synchronous runs wait for their longest samples, and for the update: more engines do not shorten these"
    report("elastic", rows(), title="tokens/s after engines have joined", note=note, save=given.save)


if __name__ == "__main__":
    main()
