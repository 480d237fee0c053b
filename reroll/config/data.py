"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import Node


class Source(Node):
    """What all prompt sources share."""

    domain: str = "default"
    """Chooses the reward of its prompts."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mix, relative to the others."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    system: str | None = None
    """A system message put before every prompt that brings none of its own."""


class Table(Source):
    """A source of rows with named columns. A row holds `messages_key` (chat messages) or `prompt_key` (one user message)."""

    path: Path
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    answer_key: str = "answer"
    """Reference answer; for sft rows without an assistant message, the completion to learn; for kto, the answer judged."""
    chosen_key: str = "chosen"
    """The better answer of a pair: text, or chat messages that continue the prompt."""
    rejected_key: str = "rejected"
    """The worse one."""
    margin_key: str = "margin"
    """By how much the better answer should win, where the row says so; for reward models."""
    label_key: str = "label"
    """Whether an answer is good: true or false, 1 or 0; for kto."""


class JsonlSource(Table):
    """One JSON object a line."""

    kind: Literal["jsonl"] = "jsonl"


class ParquetSource(Table):
    """A Parquet file."""

    kind: Literal["parquet"]


class DatasetsSource(Table):
    """A folder written by `datasets.Dataset.save_to_disk`."""

    kind: Literal["datasets"]
    split: str | None = None
    """Which split, if the folder holds a DatasetDict."""


class ReasoningGymSource(Source):
    """A reasoning-gym generator: endless verifiable tasks, scored by its own verifier (reward kind `reasoning_gym`)."""

    kind: Literal["reasoning_gym"]
    name: str
    size: int = Field(default=1000, ge=1)
    """How many tasks to generate."""
    seed: int = 0
    """Different seeds give different tasks: use another one for held-out data."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator, e.g. `{max_digits: 2}`."""


class EnvSource(Source):
    """Instances of the environment of its domain (`envs.<domain>`), by seed."""

    kind: Literal["env"]
    num: int = Field(default=10_000, ge=1)
    """How many instances."""
    first_seed: int = Field(default=0, ge=0)
    """Instances are numbered from here; take held-out ones from 1,000,000 on, where no training source reaches."""


AnyRows = JsonlSource | ParquetSource | DatasetsSource | ReasoningGymSource
RowSource = Annotated[AnyRows, Field(discriminator="kind")]
"""Sources of rows."""
SourceConfig = Annotated[AnyRows | EnvSource, Field(discriminator="kind")]


class RowData(Node):
    """Rows to train on and rows held out."""

    train: list[RowSource] = Field(min_length=1)
    eval: list[RowSource] = Field(default_factory=list)
    """Held-out rows; measured before the first step, on schedule and at the end."""
    shuffle: bool = True


class DataConfig(Node):
    """Prompts to train on and prompts held out."""

    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = Field(default_factory=list)
    """Held-out prompts; evaluated before the first step, on schedule and at the end."""
    shuffle: bool = True
