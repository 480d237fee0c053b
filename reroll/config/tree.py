"""The config tree of RL. Other pipelines have theirs beside them (`config.pipeline`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.advantages import AdvantageConfig, NormalisedAdvantageConfig, ShapingConfig
from reroll.config.agents import AgentConfig, EndpointConfig
from reroll.config.algorithm import (
    CriticConfig,
    DistillTermConfig,
    KlConfig,
    MaskConfig,
    OwnCriticConfig,
    ReferenceConfig,
    TeacherConfig,
    ValueLossConfig,
)
from reroll.config.base import Node, PipelinePath
from reroll.config.data import DataConfig
from reroll.config.envs import EnvDomainConfig, EnvWorkersConfig, ProcessEnvsConfig
from reroll.config.formula import FormulaConfig
from reroll.config.losses import Aggregation, CorrectionConfig, LossConfig, PpoLossConfig, RejectionConfig
from reroll.config.parts import EmbeddedEngineConfig, EngineConfig, EvalConfig, FixedModelConfig, RolloutConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.reward_base import RewardConfig
from reroll.config.reward_hosted import HostedJudgeConfig, OpenedRewardConfig
from reroll.config.rewards import RewardWorkersConfig, walk
from reroll.config.weights import WeightsConfig


class TrainConfig(Node):
    """How often a batch is gone through."""

    epochs: int = Field(default=1, ge=1)
    """Times that each batch is gone through."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch; the batch is split into as many parts, equal in sequences (within one) and drawn by the seed.
    Samples of one prompt go into the same part, where their number divides a part's."""
    stream: bool = False
    """Start on the groups that are ready, a micro-batch at a time, while the others are still written (docs/algorithms.md):
    the same gradient, up to rounding. Not for algorithms that look at all samples of a step at once."""


class RecordedRunConfig(Node):
    """A run, and which of its steps to train again."""

    run: Path
    """Its folder."""
    start: int = Field(default=0, ge=0)
    """Steps that are taken as they were: the run's checkpoint after so many is begun from. 0: the model that it began from."""
    stop: int | None = Field(default=None, ge=1)
    """The last step to train; null: the last that the journal holds."""
    draw: bool = False
    """Have the engine draw every sample again, each token by the weights that wrote it, and compare."""


class GuardConfig(Node):
    """Stops a run whose engine does not write what is trained: a push that did not arrive, another adapter or tokenizer."""

    enabled: bool = True
    """Whether a gap ends the run; it is measured in any case."""
    max_gap: float | None = Field(default=None, gt=0)
    """The mean distance between the engine's and the trainer's log-probs, in nats, over the tokens that the weights of the
    moment wrote. null: by precision, 0.001 in fp32, 0.15 in bf16, 0.6 in fp8; twice that for engines other than `embedded`."""
    max_stale_gap: float = Field(default=3.0, gt=0)
    """The same over tokens of older weights, from which the policy has moved on (`rollout.max_staleness`)."""


class RlvrConfig(PipelineConfig):
    """RL: single-turn tasks with verifiable rewards, environments of many turns, agents; `agentic` is another name for it."""

    runs: ClassVar[str] = "reroll.pipeline.rlvr:RlvrPipeline"

    pipeline: Literal["rlvr", "agentic"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""
    algorithm: str = "grpo"
    """The preset that fills the fields below where the file leaves them out."""
    data: DataConfig
    engine: EngineConfig = Field(default_factory=EmbeddedEngineConfig)
    """What writes the samples."""
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """One per domain; `default` judges the domains that have none of their own and do not earn by themselves, as
    environments do and agents may."""
    reward_workers: RewardWorkersConfig = Field(default_factory=RewardWorkersConfig)
    """Where rewards run that need processes of their own."""
    envs: dict[str, EnvDomainConfig] = Field(default_factory=dict)
    """Domains that are played in an environment."""
    env_workers: EnvWorkersConfig = Field(default_factory=ProcessEnvsConfig)
    """Where environments run."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Domains whose prompts go to a program of yours, which reaches the policy through an OpenAI-compatible endpoint."""
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=NormalisedAdvantageConfig)
    """How much better a sample is than what it is compared with."""
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    loss: LossConfig = Field(default_factory=PpoLossConfig)
    """What the policy gradient is taken of."""
    aggregation: Aggregation = "token_mean"
    """How the loss of tokens becomes one number. token_mean: every token weighs the same; sequence_mean: every sequence does;
    sequence_sum: token sums averaged over sequences; fixed_length: the same over the longest answer there can be (Dr. GRPO)."""
    masks: MaskConfig = Field(default_factory=MaskConfig)
    kl: KlConfig = Field(default_factory=KlConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; it costs a second pass over the head."""
    old_policy: Literal["auto", "sampler", "trainer"] = "auto"
    """What the ratio is taken against: the log-probs as sampled, or the trainer's own at the start of the update.
    auto: the sampler's where samples may be stale and the loss has a ratio, else the trainer's."""
    corrections: list[CorrectionConfig] = Field(default_factory=list)
    """Importance weights from the sampler to the trainer's policy at the start of the update; several multiply."""
    rejections: list[RejectionConfig] = Field(default_factory=list)
    """Samples that are too far from the policy to learn from; what one of them rejects is out."""
    critic: CriticConfig | None = None
    """A model of values for `advantage: {kind: gae}`; null: none."""
    value_loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """On-policy distillation, by any name."""
    distill: DistillTermConfig | None = None
    """How teachers are followed. null: what they say of the sampled token is added to its advantage; else the divergence of
    whole distributions is a term of the loss."""
    distill_only: bool = False
    """Learn from the teachers alone: rewards are measured, not trained on."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    recorded: RecordedRunConfig | None = None
    """Train on the samples in the journal of an earlier run, without engines (`reroll replay`); null: draw samples."""

    @property
    def reads(self) -> str:
        return "reroll.data.sources:load_source"

    @property
    def summary(self) -> str:
        rollout = self.rollout
        size = f"{rollout.prompts_per_step} prompts × {rollout.group_size} samples × {rollout.max_tokens} tokens"
        parts: dict[str, FormulaConfig] = {"advantage": self.advantage, "loss": self.loss}
        own = [f"{name} {node.function_name}" for name, node in parts.items() if node.kind == "import"]
        preset = [f"{self.algorithm} with"] if len(own) == 1 else []
        algorithm = " ".join([*preset, " and ".join(own)]) if own else self.algorithm
        return f"{algorithm} on {self.policy.model}, {self.run.steps} steps of {size}, {self.runtime.kind} runtime"

    def named_models(self) -> Iterator[tuple[str, FixedModelConfig | HostedJudgeConfig]]:
        yield from super().named_models()
        if isinstance(self.critic, OwnCriticConfig):
            yield "critic", self.critic
        for name, teacher in self.teachers.items():
            yield f"teachers.{name}", teacher
        for name, node in walk(self.rewards):
            if isinstance(node, OpenedRewardConfig) and node.hosted is not None:
                path, model = node.hosted
                yield ".".join(filter(None, ("rewards", name, path))), model

    @property
    def max_total_tokens(self) -> int:
        """What an episode of several turns may hold."""
        return self.rollout.max_total_tokens or self.policy.strategy.micro_batch_tokens

    @property
    def longest_answer(self) -> int:
        """The most tokens that the policy can write in one episode of any domain of the training data."""
        return max(self._longest_answer(source.domain) for source in self.data.train)

    def _longest_answer(self, domain: str) -> int:
        played = self.envs.get(domain) or self.agents.get(domain)
        rollout = self.rollout.of(domain)
        if played is None:
            return rollout.max_tokens
        return min(played.max_turns * rollout.max_tokens, rollout.max_total_tokens or self.max_total_tokens)

    @property
    def has_own_reference(self) -> bool:
        """Whether a model is held beside the policy for a KL penalty: not where that is the policy without its adapter."""
        return self.kl.coef > 0 and (self.policy.lora is None or self.reference.model is not None)

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether each group has a greedy sample beside the others, whose reward they are compared with."""
        return self.advantage.greedy_baseline

    @property
    def learns_from_advantages(self) -> bool:
        """Whether they count for anything: not where the distributions of teachers are all that is followed."""
        return not (self.distill_only and self.distill)

    @property
    def ratio_to_sampler(self) -> bool:
        """Whether ratios are to the policy that drew the samples, rather than to the one that the update starts from."""
        if self.old_policy == "auto":
            return self.rollout.max_staleness > 0 and self.loss.has_ratio
        return self.old_policy == "sampler"
