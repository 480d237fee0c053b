"""`reroll envs check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reroll.config.imports import search_in
from reroll_zoo.load_part import load_env

if TYPE_CHECKING:
    from reroll_zoo.env_check.check import Report

envs = typer.Typer(help="Environments that a policy acts in.", no_args_is_help=True)

EXIT_FAILED = 1


@envs.callback()
def _group() -> None:
    """Environments that a policy acts in."""


@envs.command("check")
def check_environment(
    name: Annotated[str, typer.Argument(help="A bundled kind, e.g. sokoban, or your own module:Class.", show_default=False)],
    options: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its options, e.g. size=5")] = None,
    action: Annotated[list[str] | None, typer.Option(help="An action it takes; may be given several times.")] = None,
    num_seeds: Annotated[int, typer.Option("--seeds", min=2, help="How many instances to play.")] = 10,
) -> None:
    """Play an environment and check what training relies on: determinism, rewards, ends, errors (exit code 1 on failure)."""
    search_in([Path()])
    node = load_env(name, options or ())
    from reroll.envs.make import make_env
    from reroll_zoo.env_check.check import check_env, listed

    report = check_env(lambda: make_env(node), seeds=range(num_seeds), policy=listed(action) if action else None)
    _print_report(report, name)
    if not report.is_ok:
        raise typer.Exit(EXIT_FAILED)


def _print_report(report: Report, name: str) -> None:
    colours = {"passed": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
    table = Table(title=name, title_justify="left")
    for column in ("", "check", "result"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        result = escape(check.detail) + (f"\n[green]→[/] {escape(check.fix)}" if check.fix else "")
        table.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", check.name, result)
    Console().print(table)
