"""Learning from preferences: the DPO family and KTO, and reward models.

The fields of a loss are the options of the function of that name in `preference_formulas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import Node, PipelinePath
from reroll.config.data import NamedColumnsConfig
from reroll.errors import Violation
from reroll_zoo.offline.config import OfflineConfig


class _PreferenceLossConfig(Node):
    uses_reference: ClassVar[bool] = True
    """Whether the starting policy must be kept beside the one that learns."""

    @property
    def options(self) -> dict[str, Any]:
        """What the loss of this kind takes."""
        return {name: value for name, value in self if name not in ("kind", "length_normalised", "sft_coef")}


class _PairLossConfig(_PreferenceLossConfig):
    uses_odds: ClassVar[bool] = False
    """Whether answers are compared by the log odds of their probabilities."""

    sft_coef: float = Field(default=0.0, ge=0)
    """Adds this much of an SFT term, the mean negative log-likelihood of the chosen answer's tokens: a margin may also grow
    while the chosen answer gets less likely. RPO's alpha (TRL: rpo_alpha)."""


class SigmoidLossConfig(_PairLossConfig):
    """DPO: the log-sigmoid of the margin between chosen and rejected."""

    kind: Literal["sigmoid"] = "sigmoid"
    beta: float = Field(default=0.1, gt=0)
    """The larger, the closer the policy stays to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be labelled the wrong way round."""
    length_normalised: bool = False
    """Divide the log-prob of an answer by its number of tokens, as Tülu 3 does."""


class IpoLossConfig(_PairLossConfig):
    """IPO: the squared distance of the margin from 1 / (2 beta), so that certain preferences do not push for ever."""

    kind: Literal["ipo"]
    beta: float = Field(default=0.1, gt=0)
    """The larger, the closer the policy stays to the reference. The paper's tau."""
    length_normalised: bool = True
    """The paper sums over the answer; its authors advise the mean, or beta would mean another thing for every length."""


class HingeLossConfig(_PairLossConfig):
    """SLiC: no push once beta times the margin has reached 1."""

    kind: Literal["hinge"]
    beta: float = Field(default=0.1, gt=0)
    """The larger, the smaller the margin that is enough."""
    length_normalised: bool = False
    """Divide the log-prob of an answer by its number of tokens."""


class SimpoLossConfig(_PairLossConfig):
    """SimPO: mean log-probs, a target margin, and no reference model."""

    uses_reference: ClassVar[bool] = False
    length_normalised: ClassVar[bool] = True

    kind: Literal["simpo"]
    beta: float = Field(default=2.0, gt=0)
    """Scales the margin of mean log-probs."""
    gamma: float = Field(default=1.0, ge=0)
    """By how much beta times the margin should exceed 0; the paper finds about half of beta good."""


class OrpoLossConfig(_PairLossConfig):
    """ORPO: an SFT term and the log odds ratio of the two answers, from mean log-probs; no reference model."""

    uses_reference: ClassVar[bool] = False
    length_normalised: ClassVar[bool] = True
    uses_odds: ClassVar[bool] = True

    kind: Literal["orpo"]
    beta: float = Field(default=0.1, gt=0)
    """How much the odds ratio counts beside the SFT term. The paper's lambda."""
    sft_coef: float = Field(default=1.0, gt=0)
    """How much the SFT term counts; 1 in the paper. Without one or a reference nothing would keep the answers likely."""


class KtoLossConfig(_PreferenceLossConfig):
    """KTO: answers judged one by one, good or bad; rows need no partner."""

    kind: Literal["kto"]
    beta: float = Field(default=0.1, gt=0)
    """The larger, the closer the policy stays to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """What a good answer weighs, beside `undesirable_weight` for a bad one."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Set the two such that weight times number of rows is about the same for good and bad ones."""


PairLossConfig = SigmoidLossConfig | IpoLossConfig | HingeLossConfig | SimpoLossConfig | OrpoLossConfig
PreferenceLossConfig = Annotated[PairLossConfig | KtoLossConfig, Field(discriminator="kind")]


class ComparedRowsConfig(OfflineConfig):
    """What is learned from answers that were compared or judged."""

    def violations(self) -> Iterator[Violation]:
        for where, source in self.data.named():
            if not isinstance(source, NamedColumnsConfig):
                problem = f"is {source.kind}, whose rows compare no answers"
                yield Violation(f"{where}.kind", problem, "use jsonl, parquet, datasets or import")


class DpoConfig(ComparedRowsConfig):
    """Direct preference optimization: the policy learns from chosen and rejected answers without a reward model."""

    runs: ClassVar[str] = "reroll_zoo.offline.preference:DpoPipeline"

    pipeline: Literal["dpo"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""
    loss: PreferenceLossConfig = Field(default_factory=SigmoidLossConfig)
    """How preferences are learned."""

    @property
    def reads(self) -> str:
        return f"reroll_zoo.offline.rows:{'load_judged' if isinstance(self.loss, KtoLossConfig) else 'load_pairs'}"

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if isinstance(self.loss, KtoLossConfig) and self.rows_per_step < 2:
            problem = "is 1, but kto also looks at answers to other prompts of the step"
            yield Violation("rows_per_step", problem, "set it to 2 or more")


class RewardModelConfig(ComparedRowsConfig):
    """A scalar head that learns to rank chosen above rejected (Bradley-Terry)."""

    runs: ClassVar[str] = "reroll_zoo.offline.preference:RewardModelPipeline"

    pipeline: Literal["reward_model"] | PipelinePath
    """What is done, and so which fields there are; or `module:Class` of a pipeline of your own."""

    @property
    def reads(self) -> str:
        return "reroll_zoo.offline.rows:load_pairs_with_margin"
