"""How rewards become a gradient, beside the estimator (`advantages`) and the loss (`losses`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll.config.divergence import DivergenceConfig, ReverseKlConfig
from reroll.config.losses import KlEstimator
from reroll.config.parts import FixedModelConfig, ModelConfig


class AdaptiveKlConfig(Node):
    """Moves the coefficient so that the measured KL stays near a target."""

    target: float = Field(gt=0)
    """KL per token to aim at."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which the coefficient may change by at most a fifth of itself."""


class KlConfig(Node):
    """A penalty for leaving the starting policy. Off at 0: then no reference model is loaded."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the reference; 0: none, and no reference is held."""
    estimator: KlEstimator | Literal["full"] = "k3"
    """From the sampled token alone, or `full`: over the whole distribution (a loss only)."""
    apply_to: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of every token."""
    times_ratio: bool = False
    """A term of the loss times the ratio to the old policy, with its gradient: then k1 and k3 have that of the true KL,
    however far the policy has moved (DeepSeek-V3.2)."""
    adaptive: AdaptiveKlConfig | None = None
    top_k: int = Field(default=0, ge=0)
    """For `full`: look at the reference's likeliest tokens and one bucket for the rest; 0 looks at all of them."""


class ReferenceConfig(Node):
    """The model that a KL penalty holds the policy near. It has the policy's strategy and devices."""

    model: str | None = None
    """Default: the policy as it starts; of one with an adapter, that without it."""
    sync_every: int = Field(default=0, ge=0)
    """Steps after which it moves to where the policy is, again and again; 0: it stays. Its weights are then saved too."""
    mix: float = Field(default=1.0, gt=0, le=1)
    """How far it moves: 1 makes it the policy, less a mixture, (1 - mix) * reference + mix * policy, in its own precision."""


class MaskConfig(Node):
    """Tokens that are sampled and scored, count in every baseline, and are left out of the loss and its denominators."""

    overlong: bool = False
    """Samples cut off at a token limit."""
    zero_advantage: bool = False
    """Tokens without an advantage: nothing is to be learned from them, and averages are over the others."""
    last_turn: bool = False
    """All turns but an episode's last."""
    keep_pass_rate: tuple[float, float] | None = None
    """Prompts whose mean reward lies outside this closed range, e.g. [0.1, 0.9]: too hard or too easy."""
    top_entropy: float | None = Field(default=None, gt=0, le=1)
    """All but this share of the step's tokens, those where the policy is the least sure what to write (0.2: the "80/20 rule").
    Unlike the others this mask takes only their advantage: they stay in denominators and in the KL and entropy terms. With
    zero_advantage they leave these too. Costs a forward pass."""


class OwnCriticConfig(ModelConfig):
    """A model of its own that estimates what is still to come; gae needs one."""

    kind: Literal["own"] = "own"
    model: str | None = None  # type: ignore[assignment]
    """Default: the policy's. A reward model may be named here too."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which only the critic learns."""


class SharedCriticConfig(Node):
    """A second head on the policy's own trunk."""

    kind: Literal["shared"]
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss beside the policy's."""


CriticConfig = Annotated[OwnCriticConfig | SharedCriticConfig, Field(discriminator="kind")]


class ValueLossConfig(Node):
    """How a critic learns."""

    clip: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    """The new estimate gains nothing by moving further than this from the old one; .inf: plain squared error."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets; null: that of the advantage. 1: the plain returns."""


class TeacherConfig(FixedModelConfig):
    """A model that says how likely it finds what the policy writes: on-policy distillation."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of log p(teacher) - log p(policy) in the advantage of each token; of the divergence, with `distill`."""
    domains: list[str] | None = None
    """Prompts it teaches; null: all. Where several teachers match, their terms add up; with `distill` one may match."""


class DistillTermConfig(Node):
    """A term of the loss: how far the policy's distribution is from its teacher's before every token that it wrote (GKD).

    Both at the temperature that the samples were drawn at.
    """

    divergence: DivergenceConfig = Field(default_factory=ReverseKlConfig)
    """Of the policy's distribution from the teachers'."""
    top_k: int = Field(default=64, ge=0)
    """Look at the teacher's likeliest tokens and one bucket for the rest; 0: at the whole vocabulary (and send all of it)."""
