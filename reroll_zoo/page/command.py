"""`reroll page`: a web page of a run, from its folder. `reroll trace`: its journal for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console


def page(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 7860,
    host: Annotated[str, typer.Option(help="Whom to listen to; 0.0.0.0 lets every machine read it.")] = "127.0.0.1",
) -> None:
    """Serve a page of RUN, finished, crashed or still running: what every sample does, the course of time, curves, samples,
    the config. It only reads RUN's folder, as it grows.
    """
    from reroll_zoo.page.run_data import RunData
    from reroll_zoo.page.server import PageServer
    from reroll_zoo.samples.folders import find_run

    console = Console(highlight=False, soft_wrap=True)
    with PageServer(RunData(find_run(run)), host=host, port=port) as server:
        console.print(f"[green]open[/] {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("closed")


def trace(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
) -> None:
    """Print RUN's journal as a trace: `reroll trace RUN > trace.json`, then open that in ui.perfetto.dev.

    Samples are slices through their phases, beside steps, pushes of weights, counters of what is in flight, and what the
    trainer's ranks recorded (run.profile_steps).
    """
    from reroll.errors import RunFolderError
    from reroll.observe.files import read_jsonl
    from reroll.observe.journal import read_journal, segments
    from reroll.observe.run_folder import RunFolder
    from reroll_zoo.page.trace import trace_events
    from reroll_zoo.samples.folders import find_run
    from reroll_zoo.samples.lifecycles import Lifecycles
    from reroll_zoo.step_profile import profile_events

    folder = RunFolder(find_run(run))
    if not segments(folder.journal_path):
        raise RunFolderError(f"{folder.path} has no journal: only runs that draw samples have one")
    lives = Lifecycles()
    lives.take(read_journal(folder.journal_path))
    metrics = read_jsonl(folder.metrics_path) if folder.metrics_path.exists() else []
    sys.stdout.write('{"displayTimeUnit":"ms","traceEvents":[')
    recorded = profile_events(folder.path, first_s=lives.first_s or 0.0)
    for number, event in enumerate(chain(trace_events(lives, metrics), recorded)):
        sys.stdout.write(f"{',' if number else ''}\n{json.dumps(event, separators=(',', ':'))}")
    sys.stdout.write("\n]}\n")
