"""`reroll show`: what a run came to, and what its policy wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from reroll.errors import RunFolderError

if TYPE_CHECKING:
    from reroll_zoo.samples.lifecycles import Lifecycle
    from reroll_zoo.samples.run_samples import RunSamples

NEWEST = 40
"""Samples that are listed unless more are asked for."""


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
    sample: Annotated[str | None, typer.Argument(metavar="SAMPLE", help="Its id; without one, samples are listed.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only samples that this step trained on.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Those that earned least, first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Those that earned most, first.")] = False,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="How many to list, the newest by default.")] = NEWEST,
    page: Annotated[
        bool, typer.Option("--page", help="Write a page for a browser into RUN: of SAMPLE, or without one of the whole run.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The same, into a file of your choice.")] = None,
) -> None:
    """See what the policy was shown, wrote and earned: the samples of RUN, one turn by turn, or a page of it all."""
    from reroll_zoo.samples.folders import failure_of, find_run
    from reroll_zoo.samples.run_samples import RunSamples
    from reroll_zoo.show.page import write_page
    from reroll_zoo.show.report import choose_samples, write_report
    from reroll_zoo.show.terminal import print_episode, print_samples

    if worst and best:
        raise typer.BadParameter("--worst and --best are two orders: give one of them")
    folder, console = find_run(run), Console(highlight=False)
    samples = RunSamples(folder)
    _print_notes(failure_of(folder))
    if sample is not None:
        episode = samples.read(samples.find(sample))
        if page or html:
            console.print(f"[green]wrote[/] {write_page(episode, folder, file=html)}", soft_wrap=True)
        else:
            print_episode(console, episode)
    elif page or html:  # A run without samples has curves and numbers to report.
        console.print(f"[green]wrote[/] {write_report(folder, choose_samples(samples), file=html)}", soft_wrap=True)
    else:
        lives = _select(samples, folder, step=step, worst=worst, best=best)
        shown = [samples.read(life) for life in (lives[:num] if worst or best else lives[-num:])]
        print_samples(console, shown, folder=folder, num_ended=len(samples.lives))
    _print_notes([samples.problem] if samples.problem else [])


def _select(samples: RunSamples, folder: Path, *, step: int | None, worst: bool, best: bool) -> list[Lifecycle]:
    if not samples.lives:
        raise RunFolderError(
            f"{folder} has no samples: none has ended yet, or its pipeline draws none, or its journal was deleted"
        )
    wanted = [life for life in samples.lives if step in (None, life.trained_version)]
    if not wanted:
        steps = sorted({life.trained_version for life in samples.lives if life.trained_version is not None})
        there = f"there are steps {steps[0]} to {steps[-1]}" if steps else "no step is over yet"
        raise typer.BadParameter(f"no sample of step {step} is known: {there}")
    if worst or best:
        # Newer ones first among equals.
        sign = -1 if best else 1
        scored = [life for life in reversed(wanted) if life.reward is not None]
        wanted = sorted(scored, key=lambda life: sign * (life.reward or 0.0))
    return wanted


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        Console(stderr=True).print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
