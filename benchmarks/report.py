"""One way to show and keep what a benchmark measured."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's command line: what all of them take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the numbers to benchmarks/results/, over those of before")
    return parser


def report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    save: bool,
    note: str = "",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print rows as a table; with `save` write them to `results/NAME.json`, and `facts` about the run beside them.

    The keys of the first row are the columns; give them their unit (`wall_s`, `bytes_per_sample`).
    """
    table = Table(title=title, caption=note or None)
    columns = list(rows[0])
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_show(row[column]) for column in columns))
    Console(width=None if Console().is_terminal else 160).print(table)
    if not save:
        return
    RESULTS.mkdir(exist_ok=True)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {
        "title": title,
        "note": note,
        "when": when,
        "machine": machine(),
        **(facts or {}),
        "rows": [dict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    return {"python": platform.python_version(), "system": platform.platform(), "processor": _processor()}


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
