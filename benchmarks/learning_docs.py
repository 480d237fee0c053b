"""The parts of docs/algorithms.md that are written by a program: the measured table, and what each preset stands for."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from learning_rows import NUM_STEPS, ROWS, Row

from reroll.config.presets import presets

DOCS = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"

_GENERATED = re.compile(r"<!-- generated: (?P<name>.+?) -->\n.*?<!-- end -->", re.DOTALL)


def rewritten(text: str, cells: Sequence[Mapping[str, Any]]) -> str:
    """The page with everything between `<!-- generated: NAME -->` and `<!-- end -->` made anew.

    NAME is `matrix`, or a preset.
    """

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        body = matrix_table(cells) if name == "matrix" else expansion(name)
        return f"<!-- generated: {name} -->\n{body}\n<!-- end -->"

    return _GENERATED.sub(part, text)


def expansion(preset: str) -> str:
    """The fields that a preset stands for, as a YAML block."""
    width_of_the_page = 120
    fields = yaml.safe_dump(presets()[preset], sort_keys=False, default_flow_style=None, width=width_of_the_page)
    return f"```yaml\n{fields.rstrip()}\n```"


def matrix_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line a row of the matrix. Rows that were not run yet are left out, and so are shorter trials."""
    lines = ["| row | held-out pass rate: before → after (lowest to highest) | seconds | settings |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        of_row = [cell for cell in cells if cell["row"] == name and cell["steps"] == NUM_STEPS]
        if of_row:
            lines.append(f"| `{name}` | {_change(of_row)} | {_seconds(of_row)} | {_settings(row)} |")
    return "\n".join(lines)


def _change(cells: Sequence[Mapping[str, Any]]) -> str:
    """Means over the seeds that came to an end, and why the others did not."""
    done = [cell for cell in cells if "failed" not in cell]
    parts = [f"seed {cell['seed']} failed: {cell['failed']}" for cell in cells if "failed" in cell]
    if done:
        before, after = (statistics.mean(cell[when] for cell in done) for when in ("before", "after"))
        lowest, highest = (pick(cell["after"] for cell in done) for pick in (min, max))
        parts.insert(0, f"{before:.2f} → **{after:.2f}** ({lowest:.2f} to {highest:.2f})")
    return "; ".join(parts).replace("|", "\\|")


def _seconds(cells: Sequence[Mapping[str, Any]]) -> str:
    seconds = [cell["seconds"] for cell in cells if "failed" not in cell]
    return f"{statistics.mean(seconds):.0f}" if seconds else ""


def _settings(row: Row) -> str:
    settings = " ".join(f"`{setting}`" for setting in row.settings)
    return f"{settings}: {row.reason}" if row.reason else settings
