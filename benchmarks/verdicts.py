"""The `math` reward against math-verify, verdict by verdict: what each refuses that is right, and accepts that is wrong.

The cases are made by rules (`verdict_cases.py`): a few hundred references of every kind that mathematical tasks have, each
written in other ways, which must be accepted, and changed, which must be refused. Both graders see the same boxed answers, one
after the other. A grader that takes more than `LIMIT_S` of CPU time for a verdict is taken to refuse, as in a run.
Run: python benchmarks/verdicts.py; with --save the page docs/results/verdicts.md is written too, with --page only that.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

from report import arguments, report
from verdict_cases import Case, make_cases
from verdict_page import write_page

from reroll.errors import RewardError
from reroll.runtime.devices import num_usable_cores
from reroll.testing import trajectory_of
from reroll.types import Prompt
from reroll_zoo.math.verifier import Math, MathConfig

LIMIT_S = 10.0
Grade = Callable[[str], bool]


class Late(BaseException):
    """A verdict took too long. No Exception: graders catch those."""


@dataclass(slots=True)
class Tally:
    """What became of the cases of one kind, or of all, in one grader's hands."""

    num_same: int = 0
    num_other: int = 0
    refused: list[list[str]] = field(default_factory=list)
    accepted: list[list[str]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    num_late: int = 0
    cpu_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.num_same += other.num_same
        self.num_other += other.num_other
        self.refused += other.refused
        self.accepted += other.accepted
        self.unreadable += other.unreadable
        self.num_late += other.num_late
        self.cpu_s += other.cpu_s


class Reroll:
    """The reward as a run has it."""

    def __init__(self) -> None:
        self._reward = Math(MathConfig(kind="math"))

    def grader(self, gold: str) -> Grade:
        """Raises ValueError for a reference that it cannot use."""
        prompt = Prompt(id="case", messages=(), domain="math", answer=gold)
        try:
            self._reward(prompt, trajectory_of("?"))
        except RewardError as error:
            raise ValueError(str(error)) from None
        return lambda answer: self._reward(prompt, trajectory_of(answer)).value == 1.0


class MathVerify:
    """math-verify as its documentation has it: both sides parsed from LaTeX, the reference once."""

    def __init__(self) -> None:
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        import math_verify

        self._math_verify = math_verify

    def grader(self, gold: str) -> Grade:
        parse, verify = self._math_verify.parse, self._math_verify.verify
        expected = parse(f"${gold}$", parsing_timeout=None)
        if not expected:
            raise ValueError(gold)
        return lambda answer: bool(verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None))


def judge(grader: Any, case: Case) -> Tally:
    tally = Tally(len(case.same), len(case.other))
    start_s = time.process_time()
    try:
        grade = grader.grader(case.gold)
    except ValueError:
        tally.unreadable.append(case.gold)
        tally.refused = [[case.gold, answer] for answer in case.same]
        return tally
    for answer, is_right in [*((answer, True) for answer in case.same), *((answer, False) for answer in case.other)]:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            verdict = grade(rf"The answer is $\boxed{{{answer}}}$.")
        except Late:
            tally.num_late += 1
            verdict = False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if verdict != is_right:
            (tally.refused if is_right else tally.accepted).append([case.gold, answer])
    tally.cpu_s = time.process_time() - start_s
    return tally


def row(kind: str, num_references: int, ours: Tally, theirs: Tally) -> dict[str, Any]:
    return {
        "kind": kind,
        "references": num_references,
        "rewrites": ours.num_same,
        "refused_reroll": len(ours.refused),
        "refused_math_verify": len(theirs.refused),
        "wrong_answers": ours.num_other,
        "accepted_reroll": len(ours.accepted),
        "accepted_math_verify": len(theirs.accepted),
        "unreadable_reroll": len(ours.unreadable),
        "unreadable_math_verify": len(theirs.unreadable),
    }


def raise_late(*_: object) -> None:
    raise Late


@cache
def graders() -> dict[str, Any]:
    """One of each in every process, made when the first case comes."""
    signal.signal(signal.SIGPROF, raise_late)
    return {"reroll": Reroll(), "math_verify": MathVerify()}


def judge_by_all(case: Case) -> dict[str, Tally]:
    return {name: judge(grader, case) for name, grader in graders().items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--references", type=int, default=30, help="of each kind, where so many differ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="write the page from what was saved, and judge nothing")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    cases = make_cases(options.references, seed=options.seed)
    with ProcessPoolExecutor(num_usable_cores()) as pool:
        judged = list(pool.map(judge_by_all, cases))
    totals = {name: Tally() for name in judged[0]}
    rows = []
    for kind in dict.fromkeys(case.kind for case in cases):
        tallies = {name: Tally() for name in totals}
        of_kind = [tally for case, tally in zip(cases, judged, strict=True) if case.kind == kind]
        for of_case in of_kind:
            for name, tally in of_case.items():
                tallies[name].add(tally)
                totals[name].add(tally)
        rows.append(row(kind, len(of_kind), *tallies.values()))
    rows.append(row("all", len(cases), *totals.values()))
    num_verdicts = totals["reroll"].num_same + totals["reroll"].num_other
    facts = {
        "math_verify": version("math-verify"),
        "seed": options.seed,
        "verdicts": num_verdicts,
        "verdicts_per_cpu_s": {name: num_verdicts / tally.cpu_s for name, tally in totals.items()},
        "late": {name: tally.num_late for name, tally in totals.items()},
        "refused": {name: tally.refused for name, tally in totals.items()},
        "accepted": {name: tally.accepted for name, tally in totals.items()},
    }
    speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in facts["verdicts_per_cpu_s"].items())
    note = f"rewrites refused and wrong answers accepted, of so many; verdicts per CPU second: {speeds}"
    report(
        "verdicts", rows, title="The math reward and math-verify on the same answers", note=note, facts=facts, save=options.save
    )
    if options.save:
        write_page()


if __name__ == "__main__":
    main()
