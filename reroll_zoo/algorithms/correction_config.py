"""What weighs or leaves out samples of another policy: one node a kind, for the functions in `corrections`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from reroll.config.losses import CorrectionConfig, RejectionConfig
from reroll_zoo.algorithms.ordered import check_ordered


class ImportanceWeightConfig(CorrectionConfig):
    """The ratio trainer / sampler, bounded."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.corrections:importance"

    kind: Literal["importance"] = "importance"

    level: Literal["token", "turn", "geometric_turn", "sequence", "geometric"] = "token"
    """The ratio of the token; the product over its turn or its sequence; or the geometric mean over its turn
    (geometric_turn) or its sequence (geometric)."""
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    """truncate: min(ratio, high). mask: 0 outside [low, high]. reject: 1 inside [low, high], 0 outside."""
    low: float = Field(default=0.5, ge=0)
    """Not used by truncate."""
    high: float = Field(default=2.0, gt=0, allow_inf_nan=True)
    """The largest ratio that counts in full."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.mode != "truncate":
            check_ordered(self.low, self.high, names="low and high")
        return self


class DistanceRejectionConfig(RejectionConfig):
    """Leaves out what is further off than a bound.

    With d = log p(sampler) - log p(policy) of a token; left out means a weight of 0: what is rejected still counts in
    denominators and in the KL and entropy terms.
    """

    runs: ClassVar[str] = "reroll_zoo.algorithms.corrections:distance"

    kind: Literal["distance"] = "distance"

    distance: Literal["k1", "k2", "k3"] = "k3"
    """k1: d; k2: d² / 2; k3: exp(-d) - 1 + d. All estimate KL(sampler || policy); k2 and k3 are never negative."""
    level: Literal["token", "turn", "sequence"] = "sequence"
    """What is left out as a whole."""
    take: Literal["mean", "sum", "max"] = "mean"
    """What its tokens' distances make together."""
    high: float = Field(gt=0)
    """The largest distance that is kept."""
    only_negative: bool = False
    """Only where the advantage is negative. `{distance: k1, high: 0.5, only_negative: true}` is DeepSeek-V3.2's mask."""
