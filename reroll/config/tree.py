"""The pipelines' config trees. `pipeline` says which."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.advantages import AdvantageConfig, NormalisedAdvantage, ShapingConfig
from reroll.config.agents import AgentConfig, EndpointConfig
from reroll.config.algorithm import CriticConfig, KlConfig, MaskConfig, TeacherConfig, ValueLossConfig
from reroll.config.base import Node
from reroll.config.data import DataConfig
from reroll.config.distill import DistillConfig
from reroll.config.envs import EnvDomain, EnvWorkersConfig, ProcessEnvs
from reroll.config.losses import Aggregation, CorrectionConfig, LossConfig, PpoLoss
from reroll.config.offline import PipelineConfig, SftConfig
from reroll.config.parts import EmbeddedEngine, EngineConfig, EvalConfig, RolloutConfig
from reroll.config.preference import DpoConfig, RewardModelConfig
from reroll.config.rewards import RewardConfig, RewardWorkersConfig
from reroll.config.weights import WeightsConfig


class TrainConfig(Node):
    """How often a batch is gone through."""

    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch; the batch is split into as many parts by sequence."""


class RlvrConfig(PipelineConfig):
    """RL: single-turn tasks with verifiable rewards, environments of many turns, agents; `agentic` is another name for it."""

    pipeline: Literal["rlvr", "agentic"]
    algorithm: str = "grpo"
    """The preset that fills the fields below where the file leaves them out."""
    data: DataConfig
    engine: EngineConfig = Field(default_factory=EmbeddedEngine)
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """One per domain; `default` judges the domains that have none of their own and do not earn by themselves, as
    environments do and agents may."""
    reward_workers: RewardWorkersConfig = Field(default_factory=RewardWorkersConfig)
    """Where rewards run that need processes of their own."""
    envs: dict[str, EnvDomain] = Field(default_factory=dict)
    """Domains that are played in an environment."""
    env_workers: EnvWorkersConfig = Field(default_factory=ProcessEnvs)
    """Where environments run."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Domains whose prompts go to a program of yours, which reaches the policy through an OpenAI-compatible endpoint."""
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
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
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @property
    def max_total_tokens(self) -> int:
        """What an episode of several turns may hold."""
        return self.rollout.max_total_tokens or self.policy.strategy.micro_batch_tokens


AnyConfig = RlvrConfig | SftConfig | DpoConfig | RewardModelConfig | DistillConfig
Config = Annotated[AnyConfig, Field(discriminator="pipeline")]
