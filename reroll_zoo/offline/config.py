"""Configs of pipelines that learn from a fixed table of rows: what they share, imitation and distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.base import PipelinePath
from reroll.config.data import RowSourceConfig, SourcesConfig
from reroll.config.divergence import DivergenceConfig
from reroll.config.parts import FixedModelConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.reward_hosted import HostedJudgeConfig
from reroll_zoo.algorithms.divergence_config import ForwardKlConfig


class RowDataConfig(SourcesConfig):
    """Rows to train on and rows held out."""

    train: list[RowSourceConfig] = Field(min_length=1)
    """What to train on; several sources are mixed by their `weight`."""
    eval: list[RowSourceConfig] = Field(default_factory=list)
    """Held-out rows; measured before the first step, on schedule and at the end."""
    shuffle: bool = True
    """Go through a source in a new order every epoch; else in the order of its rows."""


class OfflineConfig(PipelineConfig):
    """Rows in, optimizer steps out."""

    data: RowDataConfig
    rows_per_step: int = Field(default=32, ge=1)
    """Rows of one optimizer step; a pair is one row."""
    max_tokens: int = Field(default=1024, ge=2)
    """Longer rows are an error, not cut."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out rows; 0: only before the first and after the last step."""

    @property
    def summary(self) -> str:
        return f"{super().summary} of {self.rows_per_step} rows"


class SftConfig(OfflineConfig):
    """Supervised fine-tuning: loss on the answers."""

    runs: ClassVar[str] = "reroll_zoo.offline.sft:SftPipeline"

    pipeline: Literal["sft"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""

    @property
    def reads(self) -> str:
        return "reroll_zoo.offline.rows:load_conversations"


class DistillTeacherConfig(FixedModelConfig):
    """The model to learn from. Its tokenizer must know every token of the policy's under the same id."""

    top_k: int = Field(default=64, ge=0)
    """Look at its likeliest tokens and one bucket for the rest; 0 looks at the whole vocabulary (and sends all of it)."""


class DistillConfig(OfflineConfig):
    """Distillation from a teacher's token distributions.

    The loss is (1 - sft_weight) * temperature² * divergence + sft_weight * cross-entropy.
    """

    runs: ClassVar[str] = "reroll_zoo.offline.distill:DistillPipeline"

    pipeline: Literal["distill"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""
    teacher: DistillTeacherConfig
    divergence: DivergenceConfig = Field(default_factory=ForwardKlConfig)
    """Of the policy's distribution from the teacher's."""
    temperature: float = Field(default=1.0, gt=0)
    """Softens both distributions before they are compared; its square keeps the gradient's size. Imitation is at 1."""
    sft_weight: float = Field(default=0.0, ge=0, lt=1)
    """Share of imitation: the cross-entropy of the rows' own tokens."""

    @property
    def reads(self) -> str:
        return "reroll_zoo.offline.rows:load_conversations"

    def named_models(self) -> Iterator[tuple[str, FixedModelConfig | HostedJudgeConfig]]:
        yield from super().named_models()
        yield "teacher", self.teacher
