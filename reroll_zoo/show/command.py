"""`reroll show`: what a run came to, and what its policy wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from reroll.observe.episode import LoggedEpisode

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
    """See what the policy was shown, wrote and earned: the logged samples of RUN, one turn by turn, or a page of it all."""
    from reroll_zoo.episodes import find_episode, find_run, logged_episodes, read_episodes
    from reroll_zoo.show.page import write_page
    from reroll_zoo.show.report import write_report
    from reroll_zoo.show.terminal import print_episode, print_samples

    if worst and best:
        raise typer.BadParameter("--worst and --best are two orders: give one of them")
    folder, console = find_run(run), Console(highlight=False)
    if sample is None and (page or html):
        episodes, notes = read_episodes(folder / "samples.jsonl")  # A run without any has curves and numbers to report.
        _print_notes(notes)
        console.print(f"[green]wrote[/] {write_report(folder, episodes, file=html)}", soft_wrap=True)
        return
    episodes, notes = logged_episodes(folder)
    _print_notes(notes)
    if sample is None:
        wanted = _select(episodes, step=step, worst=worst, best=best)
        print_samples(console, wanted[-num:] if not (worst or best) else wanted[:num], folder=folder, num_logged=len(episodes))
        return
    episode = find_episode(episodes, sample)
    if page or html:
        console.print(f"[green]wrote[/] {write_page(episode, folder, file=html)}", soft_wrap=True)
    else:
        print_episode(console, episode)


def _select(episodes: Sequence[LoggedEpisode], *, step: int | None, worst: bool, best: bool) -> list[LoggedEpisode]:
    wanted = [episode for episode in episodes if step in (None, episode.step)]
    if not wanted:
        steps = sorted({episode.step for episode in episodes})
        raise typer.BadParameter(f"no sample of step {step} was logged: there are steps {steps[0]} to {steps[-1]}")
    if worst or best:
        # Newer ones first among equals; a sample whose reward is not known earned nothing.
        sign = -1 if best else 1
        wanted.sort(key=lambda episode: (sign * (episode.reward or 0.0), -episode.step))
    return wanted


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        Console(stderr=True).print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
