"""How rewards become a gradient, beside the estimator (`advantages`) and the loss (`losses`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll.config.losses import KlEstimator
from reroll.config.parts import FixedModel, ModelConfig


class AdaptiveKl(Node):
    """Moves the coefficient so that the measured KL stays near a target."""

    target: float = Field(gt=0)
    """KL per token to aim at."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which the coefficient may change by at most a fifth of itself."""


class KlConfig(Node):
    """A penalty for leaving the starting policy. Off at 0: then no reference model is loaded."""

    coef: float = Field(default=0.0, ge=0)
    estimator: KlEstimator | Literal["full"] = "k3"
    """From the sampled token alone, or `full`: over the whole distribution (a loss only)."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of every token."""
    adaptive: AdaptiveKl | None = None
    top_k: int = Field(default=0, ge=0)
    """For `full`: look at the reference's likeliest tokens and one bucket for the rest; 0 looks at all of them."""


class MaskConfig(Node):
    """Tokens that are sampled and scored, count in every baseline, and are left out of the loss and its denominators."""

    overlong: bool = False
    """Samples cut off at a token limit."""
    zero_advantage: bool = False
    """Tokens without an advantage: nothing is to be learned from them, and averages are over the others."""
    last_turn: bool = False
    """All turns but an episode's last."""
    solved_outside: tuple[float, float] | None = None
    """Prompts whose mean reward lies outside this closed range: too hard or too easy."""


class OwnCritic(ModelConfig):
    """A model of its own that estimates what is still to come; gae needs one."""

    kind: Literal["own"] = "own"
    model: str | None = None  # type: ignore[assignment]
    """Default: the policy's. A reward model may be named here too."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which only the critic learns."""


class SharedCritic(Node):
    """A second head on the policy's own trunk."""

    kind: Literal["shared"]
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss beside the policy's."""


CriticConfig = Annotated[OwnCritic | SharedCritic, Field(discriminator="kind")]


class ValueLossConfig(Node):
    """How a critic learns."""

    clip: float = Field(default=0.2, gt=0)
    """The new estimate gains nothing by moving further than this from the old one; .inf: plain squared error."""
    trace: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets; null: that of the advantage. 1: the plain returns."""


class TeacherConfig(FixedModel):
    """A model whose log-probs on the policy's own samples are a reward for every token: on-policy distillation."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of log p(teacher) - log p(policy) in the advantage of each token."""
    domains: list[str] | None = None
    """Prompts it teaches; null: all. Where several teachers match, their terms add up."""
