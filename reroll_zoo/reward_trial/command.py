"""`reroll rewards`: rewards tried out before they train anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reroll.config.imports import search_in
from reroll.config.rewards import walk
from reroll_zoo.load_part import AskedReward, load_reward

if TYPE_CHECKING:
    from reroll.types import Prompt
    from reroll_zoo.reward_trial.trial import RewardTrial

rewards = typer.Typer(help="Rewards that judge what a policy wrote.", no_args_is_help=True)

EXIT_FAILED = 1
_MAX_CHARS = 200
"""Characters of a text that the table shows."""


@rewards.callback()
def _group() -> None:
    """Rewards that judge what a policy wrote."""


@rewards.command("try")
def try_out(
    target: Annotated[
        str, typer.Argument(metavar="REWARD", help="A run's YAML, a kind such as math, or your own module:function.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[DOMAIN] [KEY=VALUE]...", help="Which of the YAML's rewards; options.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="FILE[:N]", help="The row to judge by: JSONL or Parquet; N from 1.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="OBJECT", help='The row itself, e.g. {"answer": "42"}.')] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="An answer; may be given several times. Default: the gold one and an empty one.")
    ] = None,
) -> None:
    """Judge answers to one row and show score, parts and time (exit code 1 if there is no score)."""
    if row and json:
        raise typer.BadParameter("--row and --json both name the row: give one of them")
    search_in([Path()])
    asked = load_reward(target, words or ())
    import asyncio

    from reroll_zoo.reward_trial.trial import first_row, row_in_file, row_in_json, try_reward

    prompt = row_in_file(asked, row) if row else row_in_json(asked, json) if json else first_row(asked)
    texts = text or ([] if prompt.answer is None else [prompt.answer]) + [""]
    verdicts = asyncio.run(try_reward(asked, prompt, texts))
    _print(asked, prompt, verdicts)
    if any(verdict.score is None for verdict in verdicts):
        raise typer.Exit(EXIT_FAILED)


def _print(asked: AskedReward, prompt: Prompt, verdicts: Sequence[RewardTrial]) -> None:
    console = Console(highlight=False)
    for message in prompt.messages:
        console.print(f"[dim]{escape(message['role'])}[/] {escape(_short(message['content']))}")
    if prompt.answer is not None:
        console.print(f"[dim]reference[/] {escape(_short(prompt.answer))}")
    table = Table(title=f"{asked.name} ({asked.node.kind})", title_justify="left", show_lines=True)
    for column in ("answer", "score", "parts"):
        table.add_column(column, overflow="fold", justify="right" if column == "score" else "left")
    table.add_column("ms", justify="right")
    for verdict in verdicts:
        parts = verdict.score.named.items() if verdict.score else ()
        value = f"{verdict.score.value:g}" if verdict.score else "[bold red]failed[/]"
        told = "\n".join(f"{name} {part:g}" for name, part in parts) if verdict.score else verdict.problem
        said = _short(verdict.text) if verdict.text else "(empty)"
        table.add_row(escape(said), value, escape(told), f"{1000 * verdict.seconds:.1f}")
    console.print(table)
    if any(node.counts_tokens for _, node in walk({asked.name: asked.node})):
        console.print("[dim]Lengths are counted in words here, in a run in tokens.[/]")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}… ({len(text)} characters)"
