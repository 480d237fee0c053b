"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll.config.data_base import Source
from reroll.config.data_code import CodeTasksSource
from reroll.config.data_instructions import InstructionsSource


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


AnyRows = JsonlSource | ParquetSource | DatasetsSource | ReasoningGymSource | CodeTasksSource | InstructionsSource
RowSource = Annotated[AnyRows, Field(discriminator="kind")]
"""Sources of rows."""
SourceConfig = Annotated[AnyRows | EnvSource, Field(discriminator="kind")]


class RowData(Node):
    """Rows to train on and rows held out."""

    train: list[RowSource] = Field(min_length=1)
    eval: list[RowSource] = Field(default_factory=list)
    """Held-out rows; measured before the first step, on schedule and at the end."""
    shuffle: bool = True


class Measuring(Node):
    """What curricula share: how well a prompt goes is the share of its group's samples that pass."""

    threshold: float = 1.0
    """A sample passes when its reward reaches this."""


class Remembering(Measuring):
    """A curriculum that keeps a pass rate for every prompt."""

    newest: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in a prompt's pass rate, an exponential mean; 1 forgets all earlier ones."""


class FilterCurriculum(Remembering):
    """Pass over prompts that are too easy or too hard, and try them again now and then."""

    kind: Literal["filter"]
    low: float = Field(default=0.05, ge=0, le=1)
    """Prompts that pass less often are too hard."""
    high: float = Field(default=0.95, ge=0, le=1)
    """Prompts that pass more often are too easy."""
    retry_epochs: int = Field(default=4, ge=1)
    """A prompt outside the range is tried again every so many epochs of its source."""


class TargetCurriculum(Remembering):
    """Prefer prompts whose pass rate is near a target: each is drawn with a chance that falls with its distance."""

    kind: Literal["target"]
    target: float = Field(default=0.5, ge=0, le=1)
    width: float = Field(default=0.2, gt=0)
    """At this distance from the target the chance is 0.61, at twice the distance 0.14: a bell curve."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The least chance, so that no prompt is given up for good. A prompt never tried has the chance 1."""


class LadderCurriculum(Measuring):
    """Begin with each domain's lowest `level`; the next one joins when the highest open one goes well enough."""

    kind: Literal["ladder"]
    opens_at: float = Field(default=0.7, gt=0, le=1)
    """Mean pass rate of the highest open level at which the next one opens."""
    groups: int = Field(default=32, ge=1)
    """The mean is over so many of its latest groups; before there are as many, nothing opens."""


CurriculumConfig = Annotated[FilterCurriculum | TargetCurriculum | LadderCurriculum, Field(discriminator="kind")]


class DataConfig(Node):
    """Prompts to train on and prompts held out."""

    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = Field(default_factory=list)
    """Held-out prompts; evaluated before the first step, on schedule and at the end."""
    shuffle: bool = True
    curriculum: CurriculumConfig | None = None
    """Which of the prompts come next, by how often they passed so far; null: all, each once an epoch."""
