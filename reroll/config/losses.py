"""Policy losses: one node a kind, its fields the options of the function of that name in `reroll.algo.losses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from reroll.config.base import ImportPath, Node

_SELECT = "select_"


class _FormulaConfig(Node):
    @property
    def options(self) -> dict[str, Any]:
        """What the loss of this kind takes."""
        return {name: value for name, value in self if name != "kind" and not name.startswith(_SELECT)}

    @property
    def selection(self) -> dict[str, Any]:
        """What the selection of this kind takes (`reroll.algo.selection`): the fields `select_*` without that prefix."""
        return {name.removeprefix(_SELECT): value for name, value in self if name.startswith(_SELECT)}


class ReinforceLossConfig(_FormulaConfig):
    """-A * log p: on-policy policy gradient, no ratio."""

    kind: Literal["reinforce"]


class PpoLossConfig(_FormulaConfig):
    """The clipped surrogate: min(ratio * A, clip(ratio) * A). GRPO, DAPO, and RAFT++ on accepted samples use it.

    clip_low 1 with clip_high .inf does not clip: ratio * A.
    """

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=0.2, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up. DAPO: 0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0, a ratio above this is not pushed down either: it would be with all its weight. Usual: 3."""


class GspoLossConfig(_FormulaConfig):
    """PPO with one ratio a sequence or turn, the geometric mean of its tokens' (GSPO). With aggregation sequence_mean."""

    kind: Literal["gspo"]
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=4e-4, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up."""
    level: Literal["sequence", "turn"] = "sequence"
    """turn: one ratio for each turn of an episode."""


class GspoTokenLossConfig(_FormulaConfig):
    """GSPO for advantages that differ within a sequence. With aggregation sequence_mean."""

    kind: Literal["gspo_token"]
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=4e-4, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up."""
    level: Literal["sequence", "turn"] = "sequence"
    """turn: one ratio for each turn of an episode."""


class GmpoLossConfig(_FormulaConfig):
    """The geometric mean of the clipped token ratios, times A (GMPO). With aggregation sequence_mean."""

    kind: Literal["gmpo"]
    clip_low: float = Field(default=0.4, ge=0, allow_inf_nan=True)
    """Bounds of the log ratio: the ratio is held above exp(-clip_low) ..."""
    clip_high: float = Field(default=0.4, ge=0, allow_inf_nan=True)
    """... and below exp(clip_high)."""


class CispoLossConfig(_FormulaConfig):
    """REINFORCE weighted by the clipped ratio: every token keeps its gradient (CISPO). With aggregation token_mean."""

    kind: Literal["cispo"]
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """1: no lower bound, as MiniMax-M1 trains."""
    clip_high: float = Field(default=4.0, ge=0, allow_inf_nan=True)
    """The weight is at most 1 + clip_high. MiniMax-M1 gives no number; ScaleRL (arXiv 2510.13786) bounds the weight by 5."""


class ToprLossConfig(_FormulaConfig):
    """Imitates what is good; pushes down what is bad only while it is still likely (TOPR). With aggregation sequence_sum."""

    kind: Literal["topr"]


class SapoLossConfig(_FormulaConfig):
    """A sigmoid of the ratio in place of the clip (SAPO). With aggregation sequence_mean."""

    kind: Literal["sapo"]
    tau_positive: float = Field(default=1.0, gt=0)
    """How fast the gradient fades as the ratio leaves 1, where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same elsewhere; a little faster, as these gradients are the unstable ones."""


class KimiLossConfig(_FormulaConfig):
    """Squared distance of tau * log ratio of the sequence from A: mirror descent (Kimi k1.5, K2). With sequence_sum."""

    kind: Literal["kimi"]
    tau: float = Field(default=0.01, gt=0)
    """How strongly the policy is held back. The reports give no number; 0.01 is arXiv 2602.05933's."""


class DroLossConfig(_FormulaConfig):
    """REINFORCE with a quadratic penalty on every token's log ratio (DRO by token)."""

    kind: Literal["dro"]
    beta: float = Field(default=0.05, ge=0)
    """How strongly the policy is held back."""


class DppoTvLossConfig(_FormulaConfig):
    """Ratio * A inside a trust region by total variation (DPPO). Made for ratios to the sampler; with fixed_length."""

    kind: Literal["dppo_tv"]
    max_divergence: float = Field(default=0.15, gt=0, le=1)
    """A token whose probability changed by more is not pushed further."""
    max_divergence_low: float | None = Field(default=None, gt=0, le=1)
    """The same where the advantage is negative; null: max_divergence."""
    max_ratio: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """A token's gradient weighs at most this. Inside the region the ratio of a rare token may be thousands."""


class DppoKlLossConfig(_FormulaConfig):
    """Ratio * A inside a trust region by KL divergence (DPPO). Made for ratios to the sampler; with fixed_length."""

    kind: Literal["dppo_kl"]
    max_divergence: float = Field(default=0.05, gt=0)
    """A token with a greater KL(old || policy), between itself and any other token, is not pushed further."""
    max_divergence_low: float | None = Field(default=None, gt=0)
    """The same where the advantage is negative; null: max_divergence."""
    max_ratio: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """A token's gradient weighs at most this. Inside the region the ratio of a rare token may be thousands."""


class ClipCovLossConfig(_FormulaConfig):
    """PPO without a few of the tokens that would cost the most entropy (Clip-Cov)."""

    kind: Literal["clip_cov"]
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
        _check_ordered(self.select_low, self.select_high, names="select_low and select_high")
        return self


class KlCovLossConfig(_FormulaConfig):
    """Ratio * A with a KL penalty on the tokens that would cost the most entropy (KL-Cov)."""

    kind: Literal["kl_cov"]
    coef: float = Field(default=1.0, ge=0)
    """Weight of the penalty."""
    select_share: float = Field(default=2e-3, gt=0, le=1)
    """Share of a step's tokens with the highest covariance of log-prob and advantage; at least one token. 32B models: 2e-4."""


class ImportLossConfig(Node):
    """A loss of your own: a function `(t: Tokens, **options) -> Tensor  # [T]`, as in `reroll.algo.losses`."""

    kind: Literal["import"]
    path: ImportPath
    """module:function"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    needs: list[Literal["entropy"]] = Field(default_factory=list)
    """What it reads of `Tokens` that costs something. entropy: a second pass over the head."""


LossConfig = Annotated[
    ReinforceLossConfig
    | PpoLossConfig
    | GspoLossConfig
    | GspoTokenLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | ToprLossConfig
    | SapoLossConfig
    | KimiLossConfig
    | DroLossConfig
    | DppoTvLossConfig
    | DppoKlLossConfig
    | ClipCovLossConfig
    | KlCovLossConfig
    | ImportLossConfig,
    Field(discriminator="kind"),
]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
"""token_mean: every token weighs the same; sequence_mean: every sequence weighs the same; sequence_sum: token sums
averaged over sequences; fixed_length: the same over the longest answer there can be (Dr. GRPO)."""

KlEstimator = Literal["k1", "k2", "k3", "low_variance", "abs"]
"""With d = log p - log p_ref. k1: d; k2: d² / 2; k3: exp(-d) - 1 + d; low_variance: k3, at most 10; abs: |d|."""


class CorrectionConfig(Node):
    """Weighs samples by trainer / sampler, where the two differ. Several are multiplied."""

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
            _check_ordered(self.low, self.high, names="low and high")
        return self


class RejectionConfig(Node):
    """Leaves out tokens, turns or sequences where the policy, as it learns, has come too far from the one that sampled.

    With d = log p(sampler) - log p(policy) of a token; left out means a weight of 0: what is rejected still counts in
    denominators and in the KL and entropy terms.
    """

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


def _check_ordered(low: float, high: float, *, names: str) -> None:
    if low > high:
        raise ValueError(f"nothing lies between {low:g} and {high:g}: swap {names}")
