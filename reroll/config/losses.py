"""Policy losses, how they are averaged, and what weighs or leaves out samples of another policy."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath
from reroll.config.formula import FormulaConfig

_SELECT = "select_"


class LossConfig(FormulaConfig):
    """What the policy gradient is taken of. What a kind `runs` is `(tokens, **arguments) -> [T]`, as in `reroll.algo.losses`.
    Kinds are found by their entry points, group `reroll.losses`."""

    group: ClassVar[str] = "reroll.losses"
    has_ratio: ClassVar[bool] = True
    """Whether it weighs tokens by the ratio to the old policy: without one, samples of an older policy are biased."""
    selects: ClassVar[str | None] = None
    """`module:name` of what picks the tokens that it treats apart (`Tokens.selected`), from all of an optimizer step:
    `(logp, advantage, mask, **selection) -> bool [T]`."""

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments.items() if not name.startswith(_SELECT)}

    @property
    def selection(self) -> dict[str, Any]:
        """What its selection takes: the fields `select_*` without that prefix."""
        return {name.removeprefix(_SELECT): value for name, value in self if name.startswith(_SELECT)}

    @property
    def sees_entropy(self) -> bool:
        """Whether it reads `Tokens.entropy`, which costs a second pass over the head."""
        return False


class ReinforceLossConfig(LossConfig):
    """-A * log p: on-policy policy gradient, no ratio."""

    runs: ClassVar[str] = "reroll.algo.losses:reinforce"
    has_ratio: ClassVar[bool] = False

    kind: Literal["reinforce"] = "reinforce"


class PpoLossConfig(LossConfig):
    """The clipped surrogate: min(ratio * A, clip(ratio) * A). GRPO, DAPO, and RAFT++ on accepted samples use it.

    clip_low 1 with clip_high .inf does not clip: ratio * A.
    """

    runs: ClassVar[str] = "reroll.algo.losses:ppo"

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A ratio below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=0.2, ge=0, allow_inf_nan=True)
    """A ratio above 1 + clip_high is not pushed further up. DAPO: 0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0, a ratio above this is not pushed down either: it would be with all its weight. Usual: 3."""


class ImportLossConfig(LossConfig):
    """A loss of your own: a function `(t: Tokens, **options) -> Tensor  # [T]`, as in `reroll.algo.losses`."""

    kind: Literal["import"] = "import"
    path: ImportPath
    """module:function"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    needs: list[Literal["entropy"]] = Field(default_factory=list)
    """What it reads of `Tokens` that costs something. entropy: a second pass over the head."""

    @property
    def function_name(self) -> str:
        return self.path

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def sees_entropy(self) -> bool:
        return "entropy" in self.needs


Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
"""token_mean: every token weighs the same; sequence_mean: every sequence weighs the same; sequence_sum: token sums
averaged over sequences; fixed_length: the same over the longest answer there can be (Dr. GRPO)."""

KlEstimator = Literal["k1", "k2", "k3", "low_variance", "abs"]
"""With d = log p - log p_ref. k1: d; k2: d² / 2; k3: exp(-d) - 1 + d; low_variance: k3, at most 10; abs: |d|."""


class CorrectionConfig(FormulaConfig):
    """Weighs samples by trainer / sampler, where the two differ. Several are multiplied.

    What a kind `runs` is `(old_logp, sampler_logp, mask, sequence, turn, **arguments) -> training.base.TokenWeights`. Kinds are
    found by their entry points, group `reroll.corrections`; one that names none is `importance`.
    """

    group: ClassVar[str] = "reroll.corrections"
    default_kind: ClassVar[str | None] = "importance"


class RejectionConfig(FormulaConfig):
    """Leaves out tokens, turns or sequences where the policy, as it learns, has come too far from the one that sampled.

    What a kind `runs` is `(logp, sampler_logp, advantage, mask, sequence, turn, **arguments) -> training.base.TokenWeights`.
    Kinds are found by their entry points, group `reroll.rejections`; one that names none is `distance`.
    """

    group: ClassVar[str] = "reroll.rejections"
    default_kind: ClassVar[str | None] = "distance"
