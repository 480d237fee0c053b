"""Advantage estimators, and what is done to rewards before them and to advantages after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.formula import FormulaConfig
from reroll.errors import Violation

if TYPE_CHECKING:
    from reroll.config.tree import RlvrConfig

Epsilon = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class AdvantageConfig(FormulaConfig):
    """How much better a sample is than what it is compared with. What a kind `runs` is `(episodes, **arguments) -> [T]`, as in
    `reroll.algo.advantages`. Kinds are found by their entry points, group `reroll.advantages`."""

    group: ClassVar[str] = "reroll.advantages"
    greedy_baseline: ClassVar[bool] = False
    """Whether it reads `Episodes.baseline`: each group then has a greedy sample beside the others."""
    reads_score_norm: ClassVar[bool] = False
    """Whether it reads `Episodes.score_norm`, which costs a forward pass of the policy."""
    reads_parts: ClassVar[bool] = False
    """Whether it looks at the named parts of the reward instead of their sum."""

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of one has nothing to be compared with."""
        return False

    @property
    def group_by_group(self) -> bool:
        """Whether the advantages of a group depend on nothing outside the group."""
        return False

    @property
    def deaf_to(self) -> str | None:
        """Why no change of a reward after it was given would change an advantage; None where it does."""
        return f"advantage {self.kind} looks at the parts of the reward" if self.reads_parts else None

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        """What keeps it from working in this config. Asked again with the settings of each domain in the place of `rollout`."""
        yield from ()


class NormalisedAdvantageConfig(AdvantageConfig):
    """(reward - mean) / std, each taken over the group, the batch, all steps so far, or not at all.

    GRPO: group and group. Dr. GRPO: group and none. RLOO: leave_one_out and none. Lite PPO: group and batch.
    REINFORCE++ with baseline: group and batch_centred.
    """

    runs: ClassVar[str] = "reroll.algo.advantages:normalised"

    kind: Literal["normalised"] = "normalised"
    mean: Literal["none", "group", "leave_one_out", "batch", "running"] = "group"
    """leave_one_out: the mean of the siblings without the sample itself."""
    std: Literal["none", "group", "batch", "batch_centred", "running"] = "group"
    """batch: of all rewards; batch_centred: of all rewards after the mean was taken off."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""

    @property
    def compares_siblings(self) -> bool:
        return self.mean in ("group", "leave_one_out") or self.std == "group"

    @property
    def group_by_group(self) -> bool:
        return self.mean in ("none", "group", "leave_one_out") and self.std in ("none", "group")


class GaeAdvantageConfig(AdvantageConfig):
    """What tokens brought beyond a critic's estimate (generalised advantage estimation, as in PPO)."""

    runs: ClassVar[str] = "reroll.algo.advantages:gae"

    kind: Literal["gae"] = "gae"
    discount: Fraction = 1.0
    """Per token."""
    gae_lambda: Fraction = 0.95
    """Lambda: 0 trusts the critic, 1 trusts the rewards."""

    @property
    def group_by_group(self) -> bool:
        return True


class ImportAdvantageConfig(AdvantageConfig):
    """Your own function: `(episodes, **options) -> Tensor [T]`, like those in `reroll.algo.advantages`."""

    kind: Literal["import"] = "import"
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    by_group: bool = False
    """Whether the advantages of a group depend on nothing outside the group: what `train.stream` asks."""

    @property
    def group_by_group(self) -> bool:
        return self.by_group

    @property
    def function_name(self) -> str:
        return self.path

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.options)


class LengthWeightConfig(Node):
    """Right answers earn more the shorter they are beside the group's other right answers (GRPO-LEAD)."""

    strength: float = Field(default=0.05, gt=0)
    """An answer one standard deviation longer than the mean earns exp(-strength) times its reward."""
    threshold: float = 0.5
    """An answer with at least this reward is right."""


class DifficultyWeightConfig(Node):
    """Good samples of hard prompts and bad samples of easy prompts weigh more (GRPO-LEAD): a logistic curve."""

    low: float = Field(default=0.4, ge=0)
    """The weight of good samples where all siblings are right."""
    high: float = Field(default=1.5, ge=0)
    """The weight of good samples where no sibling is right."""
    midpoint: Fraction = 0.75
    """The share of right answers halfway between."""
    steepness: float = Field(default=10.0, gt=0)
    """Of the curve at its midpoint."""
    threshold: float = 0.5
    """An answer with at least this reward is right."""


class RewardShapingConfig(Node):
    """What is done to rewards before any estimator, in this order."""

    length: LengthWeightConfig | None = None
    """Off unless given: `{}` for the paper's values."""
    clip: float | None = Field(default=None, gt=0)
    """To [-clip, clip]."""


class AdvantageShapingConfig(Node):
    """What is done to advantages after any estimator, in this order."""

    difficulty: DifficultyWeightConfig | None = None
    """Off unless given: `{}` for the paper's values."""
    whiten: bool = False
    """To mean 0 and standard deviation 1 over all tokens of the batch."""
    clip: float | None = Field(default=None, gt=0)
    """To [-clip, clip]."""


class ShapingConfig(Node):
    """Rewards and advantages, adjusted whatever the estimator."""

    domains: Literal["raw", "normalised"] = "raw"
    """normalised: the rewards of each domain to mean 0 and standard deviation 1 over all steps so far, before anything else, so
    that no domain counts more for its scale. What is below, and the estimator, then compare thresholds with deviations."""
    rewards: RewardShapingConfig = RewardShapingConfig()
    advantages: AdvantageShapingConfig = AdvantageShapingConfig()
