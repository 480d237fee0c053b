"""What the config tree has to offer: `reroll check --explain PATH`, `reroll schema`."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from reroll.config.base import Node
from reroll.config.explain import kinds_of
from reroll_zoo.reference.reference import (
    PRESET_FIELDS,
    SchemaEntry,
    about,
    bounds_in_words,
    default_in_words,
    find,
    set_by_presets,
    type_in_words,
)
from reroll_zoo.reference.schema import schema_text


def print_explanation(path: str) -> None:
    """Type, default, bounds and docstring of what stands at a path of the config, and the fields or kinds below it."""
    console = Console(highlight=False)
    for place, pipelines in find(path):
        kinds = kinds_of(place.owner) if place.owner else ()
        of_kind = f" of kind {', '.join(kinds)}" if kinds and not path.endswith("kind") else ""
        console.print(f"[bold]{escape(path)}[/]{of_kind}  [dim]pipeline: {', '.join(pipelines)}[/]", soft_wrap=True)
        if place.field is not None:
            _print_field(console, place.field)
        if "rlvr" in pipelines:
            _print_presets(console, path, place)
        if place.nodes:
            _print_below(console, place.nodes)


def schema() -> None:
    """Print the JSON schema of a config file, by which editors complete and check YAML: reroll schema > reroll.schema.json

    The first line of the YAML then says `# yaml-language-server: $schema=reroll.schema.json`.
    """
    typer.echo(schema_text(), nl=False)


def _print_field(console: Console, field: FieldInfo) -> None:
    default = default_in_words(field)
    facts = [
        type_in_words(field.annotation),
        bounds_in_words(field),
        default if default == "required" else f"default {default}",
    ]
    _print_indented(console, escape(", ".join(filter(None, facts))))
    if field.description:
        _print_indented(console, escape(about(field)))


def _print_presets(console: Console, path: str, place: SchemaEntry) -> None:
    for value, presets in set_by_presets(path, place.owner).items():
        _print_indented(console, f"{escape(value)} [dim]with algorithm: {', '.join(presets)}[/]")
    if path in PRESET_FIELDS and place.nodes:
        _print_indented(console, "[dim]`algorithm` fills it in: reroll check FILE --expand shows with what[/]")


def _print_below(console: Console, nodes: Sequence[type[Node]]) -> None:
    """The kinds there are, or the fields of the one node that it can be."""
    if len(nodes) > 1:
        table = Table("kind", "what it is", box=None, padding=(0, 2, 0, 2))
        for node in nodes:
            table.add_row(f"[green]{', '.join(kinds_of(node)) or node.__name__}[/]", escape(about(node)))
    else:
        _print_indented(console, escape(about(nodes[0])))
        table = Table("field", "takes", "default", "what it does", box=None, padding=(0, 2, 0, 2))
        for name, field in nodes[0].model_fields.items():
            takes = ", ".join(filter(None, [type_in_words(field.annotation), bounds_in_words(field)]))
            table.add_row(f"[green]{name}[/]", escape(takes), escape(default_in_words(field)), escape(about(field)))
    console.print(table)


def _print_indented(console: Console, text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 2)))
