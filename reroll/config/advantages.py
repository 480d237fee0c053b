"""Advantage estimators: one node a kind, its fields the options of the function of that name in `reroll.algo.advantages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node

Epsilon = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class NormalisedAdvantageConfig(Node):
    """(reward - mean) / std, each taken over the group, the batch, all steps so far, or not at all.

    GRPO: group and group. Dr. GRPO: group and none. RLOO: leave_one_out and none. Lite PPO: group and batch.
    REINFORCE++ with baseline: group and batch_centred.
    """

    kind: Literal["normalised"] = "normalised"
    mean: Literal["none", "group", "leave_one_out", "batch", "running"] = "group"
    """leave_one_out: the mean of the siblings without the sample itself."""
    std: Literal["none", "group", "batch", "batch_centred", "running"] = "group"
    """batch: of all rewards; batch_centred: of all rewards after the mean was taken off."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class RemaxAdvantageConfig(Node):
    """Reward minus what the policy's greedy answer to the same prompt earned (ReMax)."""

    kind: Literal["remax"]


class OpoAdvantageConfig(Node):
    """Reward minus the group's mean reward weighted by length (OPO)."""

    kind: Literal["opo"]


class GpgAdvantageConfig(Node):
    """Reward minus the group's mean, scaled up by the share of samples in groups whose rewards are all equal (GPG)."""

    kind: Literal["gpg"]


class GdpoAdvantageConfig(Node):
    """Each part of the reward normalised in its group, then their weighted sum over the batch (GDPO)."""

    kind: Literal["gdpo"]
    weights: dict[str, float] = Field(default_factory=dict)
    """By name of the part; others do not count. Default: every part with the weight that the reward gives it: in a stack its
    `weight`, in a Score of your own its entry in `weights`, or 1."""
    epsilon: Epsilon = 1e-6
    """Added to standard deviations."""


class PassAtKAdvantageConfig(Node):
    """Reward sets of k answers for having one right answer (pass@k training). The group must be larger than k."""

    kind: Literal["pass_at_k"]
    k: int = Field(default=4, ge=1)
    """Of the pass@k that is to rise."""
    threshold: float = 0.5
    """An answer with at least this reward is right."""


class RaftAdvantageConfig(Node):
    """1 for accepted samples, 0 for the others: imitate what was good (RAFT)."""

    kind: Literal["raft"]
    accept: Literal["threshold", "best"] = "threshold"
    """threshold: every sample with enough reward; best: one sample of each group."""
    threshold: float = 0.5
    """The least reward that is accepted."""


class ReturnsAdvantageConfig(Node):
    """The rewards of a token and those after it, less their penalties (REINFORCE; whitened: REINFORCE++)."""

    kind: Literal["returns"]
    discount: Fraction = 1.0
    """Per token."""
    whiten: bool = False
    """To mean 0 and standard deviation 1 over all tokens of the batch."""


class GaeAdvantageConfig(Node):
    """What tokens brought beyond a critic's estimate (generalised advantage estimation, as in PPO)."""

    kind: Literal["gae"]
    discount: Fraction = 1.0
    """Per token."""
    gae_lambda: Fraction = 0.95
    """Lambda: 0 trusts the critic, 1 trusts the rewards."""


class OptimalTokenBaselineAdvantageConfig(Node):
    """Reward still to come, minus the group's mean at the same place weighted by gradient norms."""

    kind: Literal["optimal_token_baseline"]
    tail: Literal["return", "zero"] = "return"
    """The advantage of tokens that come after the end of all siblings: the reward still to come, or zero."""


class TurnReturnsAdvantageConfig(Node):
    """The rewards of a turn and those after it (REINFORCE by turns), normalised over all turns of the group or batch."""

    kind: Literal["turn_returns"]
    discount: Fraction = 0.95
    """Per turn."""
    mean: Literal["none", "group", "batch"] = "group"
    """What is subtracted: nothing, or the mean over the group or the batch."""
    std: Literal["none", "group", "batch"] = "group"
    """What it is divided by: nothing, or the standard deviation over the group or the batch."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class GigpoAdvantageConfig(Node):
    """Episodes compared with their siblings, and turns with the turns that started from the same state (GiGPO)."""

    kind: Literal["gigpo"]
    discount: Fraction = 0.95
    """Per turn."""
    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of the comparison of turns; the paper's omega."""
    std: Literal["none", "group"] = "group"
    """none: only the means are taken off."""
    epsilon: Epsilon = 1e-6
    """Added to standard deviations."""


class ImportAdvantageConfig(Node):
    """Your own function: `(episodes, **options) -> Tensor [T]`, like those in `reroll.algo.advantages`."""

    kind: Literal["import"]
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


AdvantageConfig = Annotated[
    NormalisedAdvantageConfig
    | RemaxAdvantageConfig
    | OpoAdvantageConfig
    | GpgAdvantageConfig
    | GdpoAdvantageConfig
    | PassAtKAdvantageConfig
    | RaftAdvantageConfig
    | ReturnsAdvantageConfig
    | GaeAdvantageConfig
    | OptimalTokenBaselineAdvantageConfig
    | TurnReturnsAdvantageConfig
    | GigpoAdvantageConfig
    | ImportAdvantageConfig,
    Field(discriminator="kind"),
]


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
