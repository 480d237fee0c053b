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
    that every token has its version. Exit code 1 with what is not so.
    """
    import yaml

    from reroll.errors import RunFolderError
    from reroll.observe.journal import segments
    from reroll.observe.progress import progress_bar
    from reroll.observe.run_folder import RunFolder
    from reroll_zoo.audit.audit import audit as audit_journal
    from reroll_zoo.audit.audit import describe
    from reroll_zoo.samples.folders import find_run

    folder = RunFolder(find_run(run))
    if not folder.journal_path.is_dir():
        raise RunFolderError(f"{folder.path} has no journal: it was not sampled by reroll, or by an earlier version")
    config = yaml.safe_load(folder.config_path.read_text(encoding="utf-8"))
    with progress_bar(f"reading {folder.journal_path}", len(segments(folder.journal_path))) as advance:
        found = audit_journal(folder.journal_path, max_staleness=config["rollout"]["max_staleness"], on_segment=advance)
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False)
    for name, value in describe(found):
        table.add_row(name, value)
    console.print(table)
    for violation in found.violations:
        console.print(f"[red]violated[/] {escape(violation)}")
    if found.violations:
        raise typer.Exit(EXIT_VIOLATED)
    console.print("[green]ok[/] every group has one fate, and every token its version")
