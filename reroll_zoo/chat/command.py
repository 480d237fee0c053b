"""`reroll chat`: talk to a model or a checkpoint."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from reroll.errors import printable

if TYPE_CHECKING:
    from reroll_zoo.chat.chat import Chat

HELP = "/new starts over, /system TEXT sets the system message, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a run's folder or a model's name.", show_default=False)
    ],
    message: Annotated[
        list[str] | None, typer.Option("-m", "--message", help="Say this and leave; several are turns of one conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Draw from the likeliest tokens of this total chance.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 512,
    seed: Annotated[int, typer.Option(help="Equal seeds and messages give equal answers.")] = 0,
) -> None:
    """Talk to MODEL: answers appear as they are written."""
    from reroll.types import SamplingParams
    from reroll_zoo.chat.chat import Chat
    from reroll_zoo.evaluation.newest import newest_model

    console = Console(highlight=False, soft_wrap=True)
    source = newest_model(model)
    with Console(stderr=True).status(f"loading {escape(source)}"):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        talk = Chat(source, sampling=sampling, system=system)
    if message:
        for words in message:
            _answer(console, talk, words)
    elif sys.stdin.isatty():
        console.print(f"[bold]{escape(source)}[/]\n[dim]{HELP}[/]")
        _converse(console, talk)
    else:
        for line in sys.stdin:
            if line.strip():
                _answer(console, talk, line.strip())


def _converse(console: Console, talk: Chat) -> None:
    import readline  # noqa: F401  # Gives the prompt its arrow keys and history.

    while True:
        try:
            words = console.input("[bold green]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        command, _, rest = words.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command in ("/new", "/system"):
            talk.begin(rest.strip() or None)
            console.print("[dim]a new conversation[/]")
        elif command.startswith("/"):
            console.print(f"[dim]{HELP}[/]")
        elif words:
            _answer(console, talk, words)


def _answer(console: Console, talk: Chat, words: str) -> None:
    """Print the answer as it comes. What a model writes must not steer the terminal."""
    try:
        with closing(talk.say(words)) as pieces:
            for piece in pieces:
                console.print(printable(piece), end="", markup=False)
    except KeyboardInterrupt:
        console.print("[yellow] … cut[/]", end="")
    except ValueError as error:
        console.print(f"[yellow]{escape(str(error))}[/]: the conversation is too long, /new starts over", end="")
    if talk.was_cut:
        console.print("[dim] … (--max-tokens reached)[/]", end="")
    console.print()
