"""Where prompts come from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.data_base import NamedColumnsConfig as NamedColumnsConfig
from reroll.config.data_base import RowSourceConfig as RowSourceConfig
from reroll.config.data_base import SourceConfig as SourceConfig
from reroll.config.imports import import_object


class TableConfig(NamedColumnsConfig):
    """A file or folder of rows. A row holds `messages_key` (chat messages) or `prompt_key` (one user message)."""

    path: Path
    """Seen from the working directory."""

    @property
    def title(self) -> str:
        return str(self.path)


class JsonlSourceConfig(TableConfig):
    """One JSON object a line."""

    kind: Literal["jsonl"] = "jsonl"


class ParquetSourceConfig(TableConfig):
    """A Parquet file."""

    packages: ClassVar[Mapping[str, str]] = {"pyarrow": "reroll[data]"}

    kind: Literal["parquet"] = "parquet"


class DatasetsSourceConfig(TableConfig):
    """A data set of the Hugging Face hub by its name (`path: openai/gsm8k`), or a folder: one that
    `datasets.Dataset.save_to_disk` wrote, or one that is laid out as on the hub."""

    packages: ClassVar[Mapping[str, str]] = {"datasets": "reroll[data]"}

    kind: Literal["datasets"] = "datasets"
    subset: str | None = None
    """Which configuration, if there are several, e.g. `main` of GSM8K."""
    split: str | None = None
    """Which split, if there are several, e.g. `train`, or a slice such as `train[:1000]`."""
    revision: str | None = None
    """Which commit, tag or branch of the hub."""

    @property
    def is_hub_name(self) -> bool:
        """Whether the path can only mean a data set of the hub: `owner/name`, or a name of its oldest ones."""
        return (
            not self.path.exists() and not self.path.is_absolute() and len(self.path.parts) <= 2 and self.path.parts[0] != ".."
        )


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


class MeasuringConfig(Node):
    """What curricula share: how well a prompt goes is the share of its group's samples that pass."""

    threshold: float = 1.0
    """A sample passes when its reward reaches this."""


class RememberingConfig(MeasuringConfig):
    """A curriculum that keeps a pass rate for every prompt."""

    ema_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in a prompt's pass rate, an exponential mean; 1 forgets all earlier ones."""


class FilterCurriculumConfig(RememberingConfig):
    """Pass over prompts that are too easy or too hard, and try them again now and then."""

    kind: Literal["filter"]
    low: float = Field(default=0.05, ge=0, le=1)
    """Prompts that pass less often are too hard."""
    high: float = Field(default=0.95, ge=0, le=1)
    """Prompts that pass more often are too easy."""
    retry_epochs: int = Field(default=4, ge=1)
    """A prompt outside the range is tried again every so many epochs of its source."""


class TargetCurriculumConfig(RememberingConfig):
    """Prefer prompts whose pass rate is near a target: each is drawn with a chance that falls with its distance."""

    kind: Literal["target"]
    target: float = Field(default=0.5, ge=0, le=1)
    """The pass rate that is sought."""
    width: float = Field(default=0.2, gt=0)
    """At this distance from the target the chance is 0.61, at twice the distance 0.14: a bell curve."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The least chance, so that no prompt is given up for good. A prompt never tried has the chance 1."""


class LadderCurriculumConfig(MeasuringConfig):
    """Begin with each domain's lowest `level`; the next one joins when the highest open one goes well enough."""

    kind: Literal["ladder"]
    opens_at: float = Field(default=0.7, gt=0, le=1)
    """Mean pass rate of the highest open level at which the next one opens."""
    groups: int = Field(default=32, ge=1)
    """The mean is over so many of its latest groups; before there are as many, nothing opens."""


CurriculumConfig = Annotated[
    FilterCurriculumConfig | TargetCurriculumConfig | LadderCurriculumConfig, Field(discriminator="kind")
]


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
