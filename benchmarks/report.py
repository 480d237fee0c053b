"""One way to show and keep what a benchmark measured."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def report(
    name: str, rows: Sequence[Mapping[str, Any]], *, title: str, note: str = "", facts: Mapping[str, Any] | None = None
) -> Path:
    """Print rows as a table and write them to `results/NAME.json`, with `facts` about the run beside them.

    The keys of the first row are the columns; give them their unit (`wall_s`, `bytes_per_sample`).
    """
    table = Table(title=title, caption=note or None)
    columns = list(rows[0])
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_show(row[column]) for column in columns))
    Console(width=None if Console().is_terminal else 160).print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {
        "title": title,
        "note": note,
        "when": when,
        "machine": machine(),
        **(facts or {}),
        "rows": [dict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


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
