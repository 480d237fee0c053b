"""The two pipelines' config trees. `pipeline` says which."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.algorithm import AdvantageConfig, Aggregation, GrpoAdvantage, KlConfig, LossConfig, PpoLoss
from reroll.config.base import Node
from reroll.config.data import DataConfig
from reroll.config.parts import (
    CheckpointConfig,
    EmbeddedEngine,
    EngineConfig,
    EvalConfig,
    LocalRuntime,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
)
from reroll.config.rewards import RewardConfig


class TrainConfig(Node):
    """How often a batch is gone through."""

    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch; the batch is split into as many parts by sequence."""


class RlvrConfig(Node):
    """RL with verifiable rewards."""

    pipeline: Literal["rlvr"]
    algorithm: str = "grpo"
    """The preset that fills `advantage`, `loss` and `aggregation` where the file leaves them out."""
    run: RunConfig = Field(default_factory=RunConfig)
    runtime: RuntimeConfig = Field(default_factory=LocalRuntime)
    policy: PolicyConfig
    engine: EngineConfig = Field(default_factory=EmbeddedEngine)
    data: DataConfig
    rewards: dict[str, RewardConfig]
    """One per domain; `default` judges the domains that have none of their own."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    loss: LossConfig = Field(default_factory=PpoLoss)
    aggregation: Aggregation = "token_mean"
    kl: KlConfig = Field(default_factory=KlConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class SftConfig(Node):
    """Supervised fine-tuning: loss on the answers."""

    pipeline: Literal["sft"]
    run: RunConfig = Field(default_factory=RunConfig)
    runtime: RuntimeConfig = Field(default_factory=LocalRuntime)
    policy: PolicyConfig
    data: DataConfig
    rows_per_step: int = Field(default=32, ge=1)
    max_tokens: int = Field(default=1024, ge=2)
    """Longer rows are an error, not cut."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


Config = Annotated[RlvrConfig | SftConfig, Field(discriminator="pipeline")]
