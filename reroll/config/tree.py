"""The pipelines' config trees. `pipeline` says which."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.advantages import AdvantageConfig, NormalisedAdvantage, ShapingConfig
from reroll.config.algorithm import CriticConfig, KlConfig, MaskConfig, TeacherConfig, ValueLossConfig
from reroll.config.base import Node
from reroll.config.distill import DistillConfig
from reroll.config.losses import Aggregation, CorrectionConfig, LossConfig, PpoLoss
from reroll.config.offline import PipelineConfig, SftConfig
from reroll.config.parts import EmbeddedEngine, EngineConfig, EvalConfig, RolloutConfig
from reroll.config.preference import DpoConfig, RewardModelConfig
from reroll.config.rewards import RewardConfig


class TrainConfig(Node):
    """How often a batch is gone through."""

    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch; the batch is split into as many parts by sequence."""


class RlvrConfig(PipelineConfig):
    """RL with verifiable rewards."""

    pipeline: Literal["rlvr"]
    algorithm: str = "grpo"
    """The preset that fills the fields below where the file leaves them out."""
    engine: EngineConfig = Field(default_factory=EmbeddedEngine)
    rewards: dict[str, RewardConfig]
    """One per domain; `default` judges the domains that have none of their own."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=NormalisedAdvantage)
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    loss: LossConfig = Field(default_factory=PpoLoss)
    aggregation: Aggregation = "token_mean"
    masks: MaskConfig = Field(default_factory=MaskConfig)
    kl: KlConfig = Field(default_factory=KlConfig)
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; it costs a second pass over the head."""
    old_policy: Literal["auto", "sampler", "trainer"] = "auto"
    """What the ratio is taken against: the log-probs as sampled, or the trainer's own at the start of the update.
    auto: the sampler's where samples may be stale, else the trainer's."""
    corrections: list[CorrectionConfig] = Field(default_factory=list)
    """Importance weights from the sampler to the trainer's policy at the start of the update; several multiply."""
    critic: CriticConfig | None = None
    value_loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """On-policy distillation, by any name."""
    distill_only: bool = False
    """Learn from the teachers alone: rewards are measured, not trained on."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)


AnyConfig = RlvrConfig | SftConfig | DpoConfig | RewardModelConfig | DistillConfig
Config = Annotated[AnyConfig, Field(discriminator="pipeline")]
