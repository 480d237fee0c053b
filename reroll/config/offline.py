"""What pipelines have in common: all of them, and those that learn from a fixed table of rows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reroll.config.base import Node, PipelinePath
from reroll.config.cluster import ClusterConfig
from reroll.config.data import RowDataConfig
from reroll.config.parts import CheckpointConfig, LocalRuntimeConfig, PolicyConfig, RunConfig, RuntimeConfig


class PipelineConfig(Node):
    """What every pipeline has."""

    pipeline: str
    run: RunConfig = Field(default_factory=RunConfig)
    runtime: RuntimeConfig = Field(default_factory=LocalRuntimeConfig)
    """Where the workers live: in this process, in processes of this machine, or on a Ray cluster."""
    cluster: ClusterConfig | None = None
    """The machines that the run is planned and checked for; null: this machine, as far as it can be told."""
    policy: PolicyConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class OfflineConfig(PipelineConfig):
    """Rows in, optimizer steps out."""

    data: RowDataConfig
    rows_per_step: int = Field(default=32, ge=1)
    """Rows of one optimizer step; a pair is one row."""
    max_tokens: int = Field(default=1024, ge=2)
    """Longer rows are an error, not cut."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out rows; 0: only before the first and after the last step."""


class SftConfig(OfflineConfig):
    """Supervised fine-tuning: loss on the answers."""

    pipeline: Literal["sft"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""
