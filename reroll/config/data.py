"""Where prompts come from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.data_base import NamedColumnsConfig as NamedColumnsConfig
from reroll.config.data_base import RowSourceConfig as RowSourceConfig
from reroll.config.data_base import SourceConfig as SourceConfig
from reroll.config.imports import import_object
from reroll.config.registry import KindConfig
from reroll.errors import Violation


class TableConfig(NamedColumnsConfig):
    """A file or folder of rows. A row holds `messages_key` (chat messages) or `prompt_key` (one user message)."""

    path: Path
    """Seen from the working directory."""

    @property
    def title(self) -> str:
        return str(self.path)

    def violations(self) -> Iterator[Violation]:
        if not self.path.is_file():
            is_folder = self.path.is_dir()
            problem = f"{self.path} {'is a folder' if is_folder else 'does not exist'}"
            fix = "name a file in it" if is_folder else f"relative paths are taken from the working directory, {Path.cwd()}"
            yield Violation("path", problem, fix)


class JsonlSourceConfig(TableConfig):
    """One JSON object a line."""

    kind: Literal["jsonl"] = "jsonl"


class ImportSourceConfig(NamedColumnsConfig):
    """Rows of your own: what a function gives when it is called, or a class when it is made, or the rows themselves."""

    kind: Literal["import"] = "import"
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable. Any iterable of mappings will do."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    def make(self) -> Any:
        found = import_object(self.path)
        if not callable(found):
            return found
        try:
            inspect.signature(found).bind(**self.options)
        except TypeError as error:
            raise TypeError(f"{self.path} does not take these options: {error}") from None
        except ValueError:  # Some functions written in C do not tell what they take.
            pass
        return found(**self.options)

    @property
    def title(self) -> str:
        return self.path


class EnvSourceConfig(SourceConfig):
    """Instances of the environment of its domain (`envs.<domain>`), by seed."""

    kind: Literal["env"] = "env"
    num: int = Field(default=10_000, ge=1)
    """How many instances."""
    first_seed: int = Field(default=0, ge=0)
    """Instances are numbered from here; take held-out ones from 1,000,000 on, where no training source reaches."""


class SourcesConfig(Node):
    """What the `data` of every pipeline has."""

    train: Sequence[SourceConfig]
    eval: Sequence[SourceConfig] = ()

    def named(self) -> Iterator[tuple[str, SourceConfig]]:
        """(path, config) of every source."""
        for part, sources in (("train", self.train), ("eval", self.eval)):
            for index, source in enumerate(sources):
                yield f"data.{part}.{index}", source


class CurriculumConfig(KindConfig):
    """What all curricula are. What one `runs` is called with the node and all `Level`s, and gives a
    `reroll.data.curriculum.Curriculum`. Kinds are found by their entry points, group `reroll.curricula`."""

    group: ClassVar[str] = "reroll.curricula"
    uses_levels: ClassVar[bool] = False
    """Whether it goes by the `level` of sources."""

    def violations(self) -> Iterator[Violation]:
        """What is wrong with it; paths are below the node."""
        yield from ()


class DataConfig(SourcesConfig):
    """Prompts to train on and prompts held out."""

    train: list[SourceConfig] = Field(min_length=1)
    """What to train on; several sources are mixed by their `weight`."""
    eval: list[SourceConfig] = Field(default_factory=list)
    """Held-out prompts; evaluated before the first step, on schedule and at the end."""
    shuffle: bool = True
    """Go through a source in a new order every epoch; else in the order of its rows."""
    curriculum: CurriculumConfig | None = None
    """Which of the prompts come next, by how often they passed so far; null: all, each once an epoch."""
