"""`reroll init`: a project to start from."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from reroll_zoo.reference.schema import schema_text

Template = Literal["reward", "environment"]

_SUFFIX = ".txt"
"""Templates are no modules of this package."""
_NUM_TRAIN, _NUM_HELD_OUT = 320, 64


def init(
    folder: Annotated[Path, typer.Argument(help="Where to put it; made if it is not there.", show_default=False)],
    template: Annotated[
        Template, typer.Option(help="What is yours in it: a reward for single answers, or an environment of many turns.")
    ] = "reward",
) -> None:
    """Write a small project into FOLDER: a config that trains, the code to change, data, and the schema that editors complete
    the config by. No file is ever overwritten.
    """
    templates = files("reroll_zoo.project").joinpath("templates", template)
    texts = {path.name.removesuffix(_SUFFIX): path.read_text() for path in templates.iterdir()}
    texts["config.yaml"] = texts["config.yaml"].replace("NAME", _run_name(folder))
    if template == "reward":
        texts |= _sums()
    texts["reroll.schema.json"] = schema_text()
    taken = [name for name in texts if (folder / name).exists()]
    if taken:
        raise typer.BadParameter(f"{folder} holds {', '.join(taken)} already: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}. Choose another folder") from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]wrote[/] {', '.join(sorted(texts))} into {folder}")
    console.print(f"next: cd {folder}, and the commands at the top of config.yaml")


def _run_name(folder: Path) -> str:
    return re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip(".-") or "run"


def _sums() -> dict[str, str]:
    """Sums of two numbers, no held-out one among those to train on."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    rows = [json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in pairs]
    train, held_out = rows[:_NUM_TRAIN], rows[_NUM_TRAIN : _NUM_TRAIN + _NUM_HELD_OUT]
    return {"train.jsonl": "".join(train), "held_out.jsonl": "".join(held_out)}
