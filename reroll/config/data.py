"""Where prompts come from."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.data_base import CurriculumConfig, FileConfig
from reroll.config.data_base import NamedColumnsConfig as NamedColumnsConfig
from reroll.config.data_base import RowSourceConfig as RowSourceConfig
from reroll.config.data_base import SourceConfig as SourceConfig
from reroll.config.imports import import_object


class JsonlSourceConfig(FileConfig):
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


class RowDataConfig(Node):
    """Rows to train on and rows held out."""

    train: list[RowSourceConfig] = Field(min_length=1)
    """What to train on; several sources are mixed by their `weight`."""
    eval: list[RowSourceConfig] = Field(default_factory=list)
    """Held-out rows; measured before the first step, on schedule and at the end."""
    shuffle: bool = True
    """Go through a source in a new order every epoch; else in the order of its rows."""


class DataConfig(Node):
    """Prompts to train on and prompts held out."""

    train: list[SourceConfig] = Field(min_length=1)
    """What to train on; several sources are mixed by their `weight`."""
    eval: list[SourceConfig] = Field(default_factory=list)
    """Held-out prompts; evaluated before the first step, on schedule and at the end."""
    shuffle: bool = True
    """Go through a source in a new order every epoch; else in the order of its rows."""
    curriculum: CurriculumConfig | None = None
    """Which of the prompts come next, by how often they passed so far; null: all, each once an epoch."""
