"""Write docs/config.md, docs/metrics.md and reroll.schema.json from the code: `make reference`. A test holds them to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from reroll.config.base import Node
from reroll.config.explain import kinds_of
from reroll.config.pipeline import pipelines
from reroll.config.tree import RlvrConfig
from reroll_zoo.reference.catalogue import CATALOGUE
from reroll_zoo.reference.reference import PRESET_FIELDS, SchemaEntry, about, bounds_in_words, default_in_words, type_in_words
from reroll_zoo.reference.schema import schema_text

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "<!-- Written by `make reference`: change the docstrings that it is made of instead. -->"

CONFIG_INTRO = f"""# Config reference

{WRITTEN}

Every field of every pipeline, as the code has it. The same from the command line, without a file:
`reroll check --explain rollout.take_window`, `--explain loss.kind=ppo`. `reroll check FILE --expand` prints a config whole.
Editors complete by `reroll.schema.json` (`reroll schema`) where a file begins with `# yaml-language-server: $schema=PATH`.

A field that is marked † is filled in by the preset of `algorithm`, which goes before the default that is given here;
what the file says goes before both ([algorithms.md](algorithms.md)). *mapping* leads to the fields of what stands there.
"""

METRICS_INTRO = f"""# Metrics

{WRITTEN}

What a run writes into `metrics.jsonl`, shows in its live view and sends to trackers, one line a step. A name with `<domain>`
stands for one metric of each. *Merge* is how what micro-batches, ranks and workers report becomes one number: their weighted
mean, sum, largest or newest. Evaluations are lines of their own, made in one piece.
"""


def config_page() -> str:
    """docs/config.md."""
    return "\n".join([CONFIG_INTRO, *_Config().lines()])


class _Config:
    """Goes through the trees once: a node has its section where it is met first, and is linked to from elsewhere."""

    def __init__(self) -> None:
        self._titles: dict[tuple[type[Node], ...], str] = {}

    def lines(self) -> Iterator[str]:
        for root in dict.fromkeys(pipelines().values()):
            names = [name for name, other in pipelines().items() if other is root]
            yield from (f"## pipeline: {', '.join(names)}", "", about(root), "")
            sections = list(self._sections(root, path="", pipeline=names[0]))
            yield from self._table(root)
            yield from (line for section in sections for line in section)

    def _sections(self, node: type[Node], *, path: str, pipeline: str) -> Iterator[list[str]]:
        """Of everything below a node, in the order of its fields."""
        for name, field in node.model_fields.items():
            nodes = tuple(SchemaEntry(field.annotation).nodes)
            if not nodes or nodes in self._titles:
                continue
            where = f"{path}{name}"
            title = where if where not in self._titles.values() else f"{where} ({', '.join(kinds_of(node)) or pipeline})"
            self._titles[nodes] = title
            below = [list(self._sections(inner, path=f"{where}.", pipeline=pipeline)) for inner in nodes]
            yield list(self._section(title, field, nodes))
            yield from (section for sections in below for section in sections)

    def _section(self, title: str, field: FieldInfo, nodes: tuple[type[Node], ...]) -> Iterator[str]:
        yield from (f"### {title}", "")
        if field.description:
            yield from (about(field), "")
        for node in nodes:
            kinds = ", ".join(f"`{kind}`" for kind in kinds_of(node))
            yield from (f"**kind: {kinds}** {about(node)}" if kinds else about(node), "")
            yield from self._table(node)

    def _table(self, node: type[Node]) -> Iterator[str]:
        rows = [self._row(node, name, field) for name, field in node.model_fields.items() if name != "kind"]
        if rows:
            yield from ("| key | takes | default | what it does |", "|---|---|---|---|", *rows, "")

    def _row(self, node: type[Node], name: str, field: FieldInfo) -> str:
        takes = ", ".join(filter(None, [type_in_words(field.annotation), bounds_in_words(field)]))
        nodes = tuple(SchemaEntry(field.annotation).nodes)
        if nodes:
            link = f"[mapping](#{_slug(self._titles[nodes])})"
            takes = re.sub(r"a mapping by `kind`: `[^`]+`(, `[^`]+`)*|a mapping", link, takes)
        mark = " †" if issubclass(node, RlvrConfig) and name in PRESET_FIELDS else ""
        cells = (f"`{name}`{mark}", takes, default_in_words(field), about(field))
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _slug(title: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [METRICS_INTRO]
    for title, docs in CATALOGUE.items():
        lines += [f"## {title}", "", "| name | what it tells | unit | merge |", "|---|---|---|---|"]
        lines += [f"| `{doc.name}` | {doc.what} | {doc.unit} | {doc.merge or ''} |" for doc in docs]
        lines.append("")
    return "\n".join(lines)


FILES = {
    ROOT / "docs" / "config.md": config_page,
    ROOT / "docs" / "metrics.md": metrics_page,
    ROOT / "reroll.schema.json": schema_text,
}


if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text(), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
