"""docs/results/verdicts.md, written from `results/verdicts.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "verdicts.md"
NUM_SHOWN = 12
"""Of each grader's faults, spread over all of them."""
WIDEST = 60
"""Letters of an answer in a table."""

INTRO = """# Verdicts of the math reward, beside math-verify

<!-- Written by `python benchmarks/verdicts.py --page`: change benchmarks/verdict_page.py instead. -->

`python benchmarks/verdicts.py --references {per_kind} --save` gives both graders the same boxed answers, one after the other:
{references} references, {same:,} ways to write them that must be accepted, and {other:,} wrong answers that must be refused.
Measured {when} with math-verify {math_verify} on {processor}, Python {python}.

**The cases are ours.** `benchmarks/verdict_cases.py` makes them by rules from a seed: a value is drawn, written down as the
reference, written again in other ways, and changed. So right and wrong are known by construction, but which writings there
are was decided by the authors of one of the two graders, who mended it where it failed on them; math-verify had no such chance.
What careful readers would judge differently is left out. Read the table as a list of what each grader can read, not as an error
rate on the answers of a model. References come in equal numbers for every kind, which no data set has.

A rewrite that is refused costs a sample its reward; a wrong answer that is accepted teaches the policy something false.
A reference that a grader cannot read counts all of its rewrites as refused.
"""


def write_page() -> None:
    """Make the page anew from what was measured last."""
    PAGE.write_text(page_of(json.loads((RESULTS / "verdicts.json").read_text())))


def page_of(measured: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    *kinds, total = measured["rows"]
    intro = INTRO.format(
        per_kind=max(row["references"] for row in kinds),
        references=total["references"],
        same=total["rewrites"],
        other=total["wrong_answers"],
        when=measured["when"][:10],
        math_verify=measured["math_verify"],
        processor=measured["machine"]["processor"],
        python=measured["machine"]["python"],
    )
    speeds = measured["verdicts_per_cpu_s"]
    speed = f"Verdicts per CPU second: reroll {speeds['reroll']:.0f}, math-verify {speeds['math_verify']:.0f}."
    return "\n".join([intro, *_table([*kinds, total]), "", speed, "", *_faults(measured)])


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| kind of reference | references | rewrites | refused by reroll | by math-verify | wrong answers | accepted by reroll "
        "| by math-verify |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    columns = ("references", "rewrites", "refused_reroll", "refused_math_verify", "wrong_answers")
    for row in rows:
        numbers = [row[name] for name in (*columns, "accepted_reroll", "accepted_math_verify")]
        lines.append(f"| {row['kind']} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return lines


def _faults(measured: Mapping[str, Any]) -> list[str]:
    lines = []
    for verdict, heading in (("refused", "Right, and refused"), ("accepted", "Wrong, and accepted")):
        lines += [f"## {heading}", ""]
        for grader, name in (("reroll", "reroll"), ("math_verify", "math-verify")):
            faults = measured[verdict][grader]
            shown = faults[:: max(1, -(-len(faults) // NUM_SHOWN))]
            if not faults:
                lines += [f"**{name}**: none.", ""]
                continue
            among = f"{len(shown)} of {len(faults)}" if len(shown) < len(faults) else f"all {len(faults)}"
            lines += [f"**{name}**, {among}:", "", "| reference | answer |", "|---|---|"]
            lines += [f"| {_code(reference)} | {_code(answer)} |" for reference, answer in shown]
            lines.append("")
    return lines


def _code(text: str) -> str:
    """As it was written; a bar would end a table's cell."""
    short = text if len(text) <= WIDEST else f"{text[:WIDEST]}…"
    fence = "``" if "`" in short else "`"
    return f"{fence}{short.replace('|', chr(92) + '|')}{fence}"
