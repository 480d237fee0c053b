"""`reroll audit`: proves from a run's journal what became of every sample."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXIT_VIOLATED = 1


def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
) -> None:
    """Prove from RUN's journal that no group was lost, none trained twice, none older than the staleness budget allows, and
    that every token has its version; and that metrics.jsonl says of the samples what the journal says. Exit code 1 with what is
    not so.
    """
    from reroll.observe.journal import segments
    from reroll.observe.progress import progress_bar
    from reroll.observe.run_folder import RunFolder
    from reroll_zoo.audit.audit import describe
    from reroll_zoo.audit.run_audit import audit_run
    from reroll_zoo.samples.folders import find_run

    folder = RunFolder(find_run(run))
    with progress_bar(f"reading {folder.journal_path}", len(segments(folder.journal_path))) as advance:
        found = audit_run(folder, on_segment=advance)
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False)
    for name, value in describe(found):
        table.add_row(name, value)
    console.print(table)
    for violation in found.violations:
        console.print(f"[red]violated[/] {escape(violation)}")
    if found.violations:
        raise typer.Exit(EXIT_VIOLATED)
    console.print("[green]ok[/] every group has one fate, every token its version, and the metrics say what the journal says")
