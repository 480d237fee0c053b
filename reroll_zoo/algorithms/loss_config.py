"""Policy losses: one node a kind, its fields the arguments of the function of that name in `losses`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from reroll.config.losses import LossConfig
from reroll_zoo.algorithms.ordered import check_ordered


class GspoLossConfig(LossConfig):
    """PPO with one ratio a sequence or turn, the geometric mean of its tokens' (GSPO). With aggregation sequence_mean."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:gspo"

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=4e-4, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up."""
    level: Literal["sequence", "turn"] = "sequence"
    """turn: one ratio for each turn of an episode."""


class GspoTokenLossConfig(LossConfig):
    """GSPO for advantages that differ within a sequence. With aggregation sequence_mean."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:gspo_token"

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=4e-4, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up."""
    level: Literal["sequence", "turn"] = "sequence"
    """turn: one ratio for each turn of an episode."""


class GmpoLossConfig(LossConfig):
    """The geometric mean of the clipped token ratios, times A (GMPO). With aggregation sequence_mean."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:gmpo"

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0, allow_inf_nan=True)
    """Bounds of the log ratio: the ratio is held above exp(-clip_low) ..."""
    clip_high: float = Field(default=0.4, ge=0, allow_inf_nan=True)
    """... and below exp(clip_high)."""


class CispoLossConfig(LossConfig):
    """REINFORCE weighted by the clipped ratio: every token keeps its gradient (CISPO). With aggregation token_mean."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:cispo"

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """1: no lower bound, as MiniMax-M1 trains."""
    clip_high: float = Field(default=4.0, ge=0, allow_inf_nan=True)
    """The weight is at most 1 + clip_high. MiniMax-M1 gives no number; ScaleRL (arXiv 2510.13786) bounds the weight by 5."""


class ToprLossConfig(LossConfig):
    """Imitates what is good; pushes down what is bad only while it is still likely (TOPR). With aggregation sequence_sum."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:topr"

    kind: Literal["topr"] = "topr"


class SapoLossConfig(LossConfig):
    """A sigmoid of the ratio in place of the clip (SAPO). With aggregation sequence_mean."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:sapo"

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """How fast the gradient fades as the ratio leaves 1, where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same elsewhere; a little faster, as these gradients are the unstable ones."""


class KimiLossConfig(LossConfig):
    """Squared distance of tau * log ratio of the sequence from A: mirror descent (Kimi k1.5, K2). With sequence_sum."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:kimi"

    kind: Literal["kimi"] = "kimi"
    tau: float = Field(default=0.01, gt=0)
    """How strongly the policy is held back. The reports give no number; 0.01 is arXiv 2602.05933's."""


class DroLossConfig(LossConfig):
    """REINFORCE with a quadratic penalty on every token's log ratio (DRO by token)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:dro"

    kind: Literal["dro"] = "dro"
    beta: float = Field(default=0.05, ge=0)
    """How strongly the policy is held back."""


class DppoTvLossConfig(LossConfig):
    """Ratio * A inside a trust region by total variation (DPPO). Made for ratios to the sampler; with fixed_length."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:dppo_tv"

    kind: Literal["dppo_tv"] = "dppo_tv"
    max_divergence: float = Field(default=0.15, gt=0, le=1)
    """A token whose probability changed by more is not pushed further."""
    max_divergence_low: float | None = Field(default=None, gt=0, le=1)
    """The same where the advantage is negative; null: max_divergence."""
    max_ratio: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """A token's gradient weighs at most this. Inside the region the ratio of a rare token may be thousands."""


class DppoKlLossConfig(LossConfig):
    """Ratio * A inside a trust region by KL divergence (DPPO). Made for ratios to the sampler; with fixed_length."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:dppo_kl"

    kind: Literal["dppo_kl"] = "dppo_kl"
    max_divergence: float = Field(default=0.05, gt=0)
    """A token with a greater KL(old || policy), between itself and any other token, is not pushed further."""
    max_divergence_low: float | None = Field(default=None, gt=0)
    """The same where the advantage is negative; null: max_divergence."""
    max_ratio: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """A token's gradient weighs at most this. Inside the region the ratio of a rare token may be thousands."""


class ClipCovLossConfig(LossConfig):
    """PPO without a few of the tokens that would cost the most entropy (Clip-Cov)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:clip_cov"
    selects: ClassVar[str | None] = "reroll_zoo.algorithms.selections:between"

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=0.2, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up."""
    select_share: float = Field(default=2e-4, gt=0, le=1)
    """Share of a step's tokens to leave out; at least one token."""
    select_low: float = 1.0
    """Leave out tokens whose covariance of log-prob and advantage is at least this ..."""
    select_high: float = 5.0
    """... and at most this."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_ordered(self.select_low, self.select_high, names="select_low and select_high")
        return self


class KlCovLossConfig(LossConfig):
    """Ratio * A with a KL penalty on the tokens that would cost the most entropy (KL-Cov)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.losses:kl_cov"
    selects: ClassVar[str | None] = "reroll_zoo.algorithms.selections:highest"

    kind: Literal["kl_cov"] = "kl_cov"
    coef: float = Field(default=1.0, ge=0)
    """Weight of the penalty."""
    select_share: float = Field(default=2e-3, gt=0, le=1)
    """Share of a step's tokens with the highest covariance of log-prob and advantage; at least one token. 32B models: 2e-4."""
