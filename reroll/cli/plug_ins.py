"""Commands of other packages, and of the zoo: the entry points of the group `reroll.commands`.

A package adds one with a line of its `pyproject.toml`: the command's name, and a function as typer takes it, or a `typer.Typer`
of several. Its module is imported with every `reroll`, so it loads what it needs when it is called.
"""

from __future__ import annotations

import logging

import typer

from reroll.config.registry import entry_names, load_entry

log = logging.getLogger(__name__)


def add_plug_ins(app: typer.Typer) -> None:
    """Add them all; one that cannot be imported is named, and harms no other."""
    for name in entry_names("reroll.commands"):
        try:
            command = load_entry("reroll.commands", name)
        except Exception as error:
            log.warning("there is no command %s: %s", name, error)
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
