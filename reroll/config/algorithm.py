"""How rewards become a gradient. Presets are names for plain fields: `algorithm: grpo` is only a shorter way to write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import Node


class GrpoAdvantage(Node):
    """Reward minus the group's mean, over the group's standard deviation."""

    kind: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GroupMeanAdvantage(Node):
    """Reward minus the group's mean: REINFORCE with a group baseline."""

    kind: Literal["group_mean"]


AdvantageConfig = Annotated[GrpoAdvantage | GroupMeanAdvantage, Field(discriminator="kind")]


class PpoLoss(Node):
    """The clipped surrogate: min(ratio * A, clip(ratio) * A)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)


class ReinforceLoss(Node):
    """-A * log p: on-policy policy gradient, no ratio."""

    kind: Literal["reinforce"]


LossConfig = Annotated[PpoLoss | ReinforceLoss, Field(discriminator="kind")]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""token_mean: every token weighs the same; sequence_mean: every sequence weighs the same;
sequence_sum: token sums averaged over sequences."""


class KlConfig(Node):
    """A penalty for leaving the starting policy. Off at 0: then no reference model is loaded."""

    coef: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}, "loss": {"kind": "ppo"}, "aggregation": "token_mean"},
    "reinforce": {"advantage": {"kind": "group_mean"}, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "ppo_clip": {"advantage": {"kind": "group_mean"}, "loss": {"kind": "ppo"}, "aggregation": "token_mean"},
}
"""Each preset as the fields it stands for; fields the user writes win over the preset's."""
