"""`reroll trace`: a run's journal for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def trace(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
) -> None:
    """Print RUN's journal as a trace: `reroll trace RUN > trace.json`, then open that in ui.perfetto.dev.

    Samples are slices through their phases, beside steps, pushes of weights and counters of what is in flight.
    """
    from reroll.errors import RunFolderError
    from reroll.observe.episode import find_run
    from reroll.observe.files import read_jsonl
    from reroll.observe.journal import read_journal, segments
    from reroll.observe.lifecycles import Lifecycles
    from reroll.observe.run_folder import RunFolder
    from reroll.observe.trace import trace_events

    folder = RunFolder(find_run(run))
    if not segments(folder.journal_path):
        raise RunFolderError(f"{folder.path} has no journal: only runs that draw samples have one")
    lives = Lifecycles()
    lives.take(read_journal(folder.journal_path))
    metrics = read_jsonl(folder.metrics_path) if folder.metrics_path.exists() else []
    sys.stdout.write('{"displayTimeUnit":"ms","traceEvents":[')
    for number, event in enumerate(trace_events(lives, metrics)):
        sys.stdout.write(f"{',' if number else ''}\n{json.dumps(event, separators=(',', ':'))}")
    sys.stdout.write("\n]}\n")
