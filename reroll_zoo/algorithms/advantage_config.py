"""Estimators: one node a kind, its fields the arguments of the function of that name in `advantages`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.advantages import AdvantageConfig, Epsilon, Fraction
from reroll.config.rewards import EnvRewardConfig, RewardConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


class _ByGroupConfig(AdvantageConfig):
    """An estimator that looks at nothing outside the group."""

    @property
    def group_by_group(self) -> bool:
        return True


class _SiblingsConfig(AdvantageConfig):
    """An estimator that compares the samples of a group."""

    @property
    def compares_siblings(self) -> bool:
        return True


class RemaxAdvantageConfig(_ByGroupConfig):
    """Reward minus what the policy's greedy answer to the same prompt earned (ReMax)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:remax"
    greedy_baseline: ClassVar[bool] = True

    kind: Literal["remax"] = "remax"


class OpoAdvantageConfig(_SiblingsConfig, _ByGroupConfig):
    """Reward minus the group's mean reward weighted by length (OPO)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:opo"

    kind: Literal["opo"] = "opo"


class GpgAdvantageConfig(_SiblingsConfig):
    """Reward minus the group's mean, scaled up by the share of samples in groups whose rewards are all equal (GPG)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:gpg"

    kind: Literal["gpg"] = "gpg"


class GdpoAdvantageConfig(_SiblingsConfig):
    """Each part of the reward normalised in its group, then their weighted sum over the batch (GDPO)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:gdpo"
    reads_parts: ClassVar[bool] = True

    kind: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=dict)
    """By name of the part; others do not count. Default: every part with the weight that the reward gives it: in a stack its
    `weight`, in a Score of your own its entry in `weights`, or 1."""
    epsilon: Epsilon = 1e-6
    """Added to standard deviations."""

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        """Every domain's reward must have parts, and the weights must name some of them."""
        if config.distill_only:
            return
        known: set[str] | None = set()
        for domain in dict.fromkeys(source.domain for source in config.data.train):
            plays = domain in config.envs or domain in config.agents
            name = domain if plays or domain in config.rewards else "default"
            names = _part_names(config.rewards.get(name), is_agent=domain in config.agents)
            if names is None:
                known = None
            elif names:
                known = None if known is None else known | names
            elif plays or name in config.rewards:  # A domain without any reward is told of elsewhere.
                fix = "make it {kind: stack, parts: {…}}, or return a Score with parts from a function of yours; or use grpo"
                problem = f"has no parts, which advantage gdpo normalises one by one (domain {domain})"
                yield Violation(f"rewards.{name}", problem, fix)
        if known:
            fix = f"choose among: {', '.join(sorted(known))}"
            for name in sorted(self.weights.keys() - known):
                yield Violation(f"advantage.weights.{name}", "is no part of any reward", fix)


def _part_names(reward: RewardConfig | None, *, is_agent: bool) -> set[str] | None:
    """What the parts of a reward are called; empty: it has none; None: only your code, or an agent, knows."""
    if reward is None or isinstance(reward, EnvRewardConfig):
        return None if is_agent else set()
    return reward.part_names


def _by_threshold(kind: str) -> str:
    return f"advantage {kind} asks only whether the reward reaches its threshold"


class PassAtKAdvantageConfig(_ByGroupConfig):
    """Reward sets of k answers for having one right answer (pass@k training). The group must be larger than k."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:pass_at_k"

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=1)
    """Of the pass@k that is to rise."""
    threshold: float = 0.5
    """An answer with at least this reward is right."""

    @property
    def deaf_to(self) -> str | None:
        return _by_threshold(self.kind)

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        """A group must be larger than the sets that are made of it."""
        size = config.rollout.group_size
        if self.k >= size:
            problem = f"{self.k} of {size} siblings: every set would be nearly the whole group"
            yield Violation("advantage.k", problem, f"set it below rollout.group_size, which is {size}")


class RaftAdvantageConfig(_ByGroupConfig):
    """1 for accepted samples, 0 for the others: imitate what was good (RAFT)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:raft"

    kind: Literal["raft"] = "raft"
    accept: Literal["threshold", "best"] = "threshold"
    """threshold: every sample with enough reward; best: one sample of each group."""
    threshold: float = 0.5
    """The least reward that is accepted."""

    @property
    def deaf_to(self) -> str | None:
        return _by_threshold(self.kind) if self.accept == "threshold" else None


class ReturnsAdvantageConfig(AdvantageConfig):
    """The rewards of a token and those after it, less their penalties (REINFORCE; whitened: REINFORCE++)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:returns"

    kind: Literal["returns"] = "returns"
    discount: Fraction = 1.0
    """Per token."""
    whiten: bool = False
    """To mean 0 and standard deviation 1 over all tokens of the batch."""

    @property
    def group_by_group(self) -> bool:
        return not self.whiten


class OptimalTokenBaselineAdvantageConfig(_SiblingsConfig, _ByGroupConfig):
    """Reward still to come, minus the group's mean at the same place weighted by gradient norms."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:optimal_token_baseline"
    reads_score_norm: ClassVar[bool] = True

    kind: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    tail: Literal["return", "zero"] = "return"
    """The advantage of tokens that come after the end of all siblings: the reward still to come, or zero."""


class TurnReturnsAdvantageConfig(AdvantageConfig):
    """The rewards of a turn and those after it (REINFORCE by turns), normalised over all turns of the group or batch."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:turn_returns"

    kind: Literal["turn_returns"] = "turn_returns"
    discount: Fraction = 0.95
    """Per turn."""
    mean: Literal["none", "group", "batch"] = "group"
    """What is subtracted: nothing, or the mean over the group or the batch."""
    std: Literal["none", "group", "batch"] = "group"
    """What it is divided by: nothing, or the standard deviation over the group or the batch."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""

    @property
    def compares_siblings(self) -> bool:
        return "group" in (self.mean, self.std)

    @property
    def group_by_group(self) -> bool:
        return "batch" not in (self.mean, self.std)


class GigpoAdvantageConfig(_SiblingsConfig, _ByGroupConfig):
    """Episodes compared with their siblings, and turns with the turns that started from the same state (GiGPO)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.advantages:gigpo"

    kind: Literal["gigpo"] = "gigpo"
    discount: Fraction = 0.95
    """Per turn."""
    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of the comparison of turns; the paper's omega."""
    std: Literal["none", "group"] = "group"
    """none: only the means are taken off."""
    epsilon: Epsilon = 1e-6
    """Added to standard deviations."""
