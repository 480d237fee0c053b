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
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: there also in bf16, with the kernels and the cache that a GPU has.")
    ] = "cpu",
) -> None:
    """Compare a model here with Hugging Face's own, in fp32: packed training, a step, LoRA, the engine.

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
        check_room(name, device)
        found = measure(name, training=True, half=device != "cpu", device=device, on_part=status.update)
    print_measured(console, found, title=folder if layers is None else f"{folder}: {layers} layers, random weights")
    if not found.agrees:
        raise typer.Exit(EXIT_FAILED)


def print_measured(console: Console, found: Measured, *, title: str) -> None:
    """What works, with the largest gap, and why the rest does not."""
    from reroll_zoo.model_check.contract import HALF_TOLERANCE, LENGTHS, TOLERANCE, is_rounding

    table = Table(title=title, title_justify="left")
    for column in ("", "what", "result"):
        table.add_column(column, overflow="fold")

    def add(what: str, gap: float | None, refused: str = "", rounding: float = 0.0) -> None:
        if refused:
            table.add_row(_REFUSED, what, escape(refused))
        elif gap is not None:
            of_rounding = f"; the last bits of the weights move it by {rounding:.0e}" if gap > TOLERANCE and rounding else ""
            table.add_row(_WORKS if is_rounding(gap, rounding) else _FAILS, what, f"largest gap {gap:.0e}{of_rounding}")

    def add_half(what: str, times: float | None) -> None:
        if times is not None:
            word = _WORKS if times <= HALF_TOLERANCE else _FAILS
            table.add_row(word, what, f"{times:.2f} times as far from fp32 as Hugging Face's own in bf16")

    if found.refused:
        table.add_row(_REFUSED, "training and generation", escape(found.refused))
        console.print(table)
        return
    add("packed into one row = alone", found.packed)
    add("common beginnings computed once", found.siblings)
    add("gradients of every weight", found.gradient, rounding=found.gradient_rounding)
    add("log-probs after a training step", found.step, rounding=found.step_rounding)
    add("log-probs with a LoRA adapter", found.lora, found.lora_refused)
    add("the embedded engine's log-probs", found.engine, found.engine_refused)
    add("the same after a push", found.pushed)
    if found.engine is not None:
        is_same = found.num_same == len(LENGTHS)
        table.add_row(
            _WORKS if is_same else _FAILS, "greedy tokens as `generate`", f"{found.num_same} of {len(LENGTHS)} prompts"
        )
    add_half("in bf16: packed", found.half)
    add_half("in bf16: the embedded engine", found.engine_half)
    if found.broken:
        table.add_row(_FAILS, "an error", escape(found.broken))
    console.print(table)
    console.print("gaps to Hugging Face's eager attention in fp32; those of rounding's size pass (docs/models.md)")
