"""`reroll models check`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from reroll_zoo.model_check.contract import Measured

EXIT_FAILED = 1
_WORKS, _FAILS, _REFUSED = "[green]works[/]", "[bold red]fails[/]", "[yellow]refused[/]"


def check(
    folder: Annotated[str, typer.Argument(help="A model's folder, or a name as policy.model takes it.", show_default=False)],
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Take a random model of its config with so many layers: for one that memory does not hold."),
    ] = None,
) -> None:
    """Compare a model here with Hugging Face's own, in fp32 on the CPU: packed training, a step, LoRA, the engine.

    Exit code 1 if anything but an optional part is refused or differs.
    """
    from transformers.utils import logging

    from reroll_zoo.model_check.contract import measure
    from reroll_zoo.model_check.room import check_room, shortened

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="reroll-check-") as made, console.status("loading") as status:
        name = shortened(folder, Path(made), num_layers=layers) if layers is not None else folder
        check_room(name)
        found = measure(name, training=True, on_part=status.update)
    print_measured(console, found, title=folder if layers is None else f"{folder}: {layers} layers, random weights")
    if not found.agrees:
        raise typer.Exit(EXIT_FAILED)


def print_measured(console: Console, found: Measured, *, title: str) -> None:
    """What works, with the largest gap, and why the rest does not."""
    from reroll_zoo.model_check.contract import LENGTHS, TOLERANCE, is_rounding

    table = Table(title=title, title_justify="left")
    for column in ("", "what", "result"):
        table.add_column(column, overflow="fold")

    def add(what: str, gap: float | None, refused: str = "", rounding: float = 0.0) -> None:
        if refused or gap is None:
            table.add_row(_REFUSED, what, escape(refused))
            return
        of_rounding = f"; the last bits of the weights move it by {rounding:.0e}" if gap > TOLERANCE and rounding else ""
        table.add_row(_WORKS if is_rounding(gap, rounding) else _FAILS, what, f"largest gap {gap:.0e}{of_rounding}")

    if found.refused:
        table.add_row(_REFUSED, "training and generation", escape(found.refused))
        console.print(table)
        return
    add("packed into one row = alone", found.packed)
    add("common beginnings computed once", found.siblings)
    add("gradients of every weight", found.gradient, rounding=found.gradient_rounding)
    add("log-probs after a training step", found.step, rounding=found.step_rounding)
    add("log-probs with a LoRA adapter", found.lora, found.lora_refused)
    if found.engine_refused:
        table.add_row(_REFUSED, "the embedded engine", escape(found.engine_refused))
    else:
        add("the embedded engine's log-probs", found.engine)
        add("the same after a push", found.pushed)
        is_same = found.num_same == len(LENGTHS)
        table.add_row(
            _WORKS if is_same else _FAILS, "greedy tokens as `generate`", f"{found.num_same} of {len(LENGTHS)} prompts"
        )
    console.print(table)
    console.print("gaps to Hugging Face's eager attention in fp32; those of rounding's size pass (docs/models.md)")
