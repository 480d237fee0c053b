"""`reroll replay`: trains a run again from its journal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

EXIT_DIFFERS = 1


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
    start: Annotated[
        int, typer.Option("--from", min=0, metavar="STEP", help="Begin from the run's checkpoint after this step.")
    ] = 0,
    stop: Annotated[
        int | None, typer.Option("--step", min=1, metavar="STEP", help="End after this step; default: the last.")
    ] = None,
    draw: Annotated[
        bool, typer.Option("--draw", help="Have the engine draw every sample again, by the weights that wrote it, and compare.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE", help="Change how it is trained, e.g. loss.clip_high=0.3; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run; default: NAME-replay.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a replay that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew over an earlier replay of this name.")] = False,
) -> None:
    """Train RUN again on the samples in its journal, without engines, environments or rewards.

    As it was trained, it comes to the same weights to the bit, which is checked against RUN's checkpoints (exit code 1 if not).
    With --with, it shows what the same samples teach under another loss, advantage, optimizer, ...
    """
    from reroll.pipeline.run import train
    from reroll_zoo.replay.pipeline import compare_weights, drawn_again, replay_config
    from reroll_zoo.samples.folders import find_run

    source = find_run(run)
    config = replay_config(source, start=start, stop=stop, draw=draw, changes=changes or (), name=name)
    outcome = train(config, resume=resume, overwrite=overwrite, code_folder=source)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]trained again[/] to step {outcome.num_steps} in {outcome.seconds:.0f} s: see {outcome.folder}")
    found = [one for one in compare_weights(outcome.folder, source) if one.step > start]
    is_same = not any(one.largest_difference for one in found)
    for one in found:
        same = "equal to the bit" if one.largest_difference == 0 else f"differ by {one.largest_difference:.2g} at most"
        console.print(f"weights after step {one.step}: {same}")
    if draw:
        tokens = drawn_again(outcome.folder)
        console.print(
            f"{tokens.num_tokens:,} tokens drawn again, {tokens.num_differing:,} of them otherwise; log-probs of the others "
            f"within {tokens.logp_gap:.2g}"
        )
        is_same &= tokens.num_differing == 0
    if not found:
        console.print("the run has no checkpoint of these steps to compare with")
    if not changes and not is_same:
        console.print("[red]not the same[/]: other hardware, other software, or something besides the samples decides the run")
        raise typer.Exit(EXIT_DIFFERS)
