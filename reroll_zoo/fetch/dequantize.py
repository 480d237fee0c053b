"""`reroll models dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reroll.errors import ModelError


def dequantize(
    model: Annotated[str, typer.Argument(help="A model's folder, or a name as policy.model takes it.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new folder.", show_default=False)],
) -> None:
    """Write a checkpoint of MXFP4 or FP8 weights as an ordinary folder in bf16, for vLLM, SGLang and other programs.

    reroll itself needs no such copy: it reads those weights as plain ones.
    """
    import torch

    from reroll.models.load import load_model, load_tokenizer, resolve_base, save_model
    from reroll.models.quantized import quantization

    method = quantization(resolve_base(model))
    if method is None:
        raise ModelError(f"{model} stores plain weights already: use it as it is")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder} is already there: name a new folder")
    console = Console(highlight=False)
    with console.status(f"reading {model}") as status:
        plain = load_model(model, dtype=torch.bfloat16, device="cpu")
        status.update(f"writing {folder}")
        save_model(plain, load_tokenizer(model), folder)
    console.print(f"[green]written[/] {folder}: what was {method} is bf16")
