"""Tables as a config names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from reroll.config.data import TableConfig
from reroll.errors import Violation


class ParquetSourceConfig(TableConfig):
    """A Parquet file."""

    packages: ClassVar[Mapping[str, str]] = {"pyarrow": "reroll[data]"}
    runs: ClassVar[str] = "reroll_zoo.tables.parquet:read_parquet"

    kind: Literal["parquet"] = "parquet"


class DatasetsSourceConfig(TableConfig):
    """A data set of the Hugging Face hub by its name (`path: openai/gsm8k`), or a folder: one that
    `datasets.Dataset.save_to_disk` wrote, or one that is laid out as on the hub."""

    packages: ClassVar[Mapping[str, str]] = {"datasets": "reroll[data]"}
    runs: ClassVar[str] = "reroll_zoo.tables.hub:read_dataset"

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

    def violations(self) -> Iterator[Violation]:
        if not self.path.is_dir() and not self.is_hub_name:
            fix = "give a folder written by save_to_disk, or a name of the hub such as openai/gsm8k"
            yield Violation("path", f"{self.path} is no folder", fix)
