"""What must hold for an update to begin before all of its samples are there (`train.stream`)."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.algorithm import OwnCriticConfig, SharedCriticConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def stream_violations(config: RlvrConfig) -> Iterator[Violation]:
    """The part of the algorithm that has to see the whole step, if there is one."""
    for problem in _whole_step(config):
        yield Violation("train.stream", f"is true, but {problem}", "set it to false, or change that")
    if not config.policy.strategy.scales_gradients:
        kind = config.policy.strategy.kind
        problem = f"is true, but strategy {kind} cannot correct a gradient that it has summed"
        yield Violation("train.stream", problem, "use strategy torch or fsdp2, or set it to false")


def _whole_step(config: RlvrConfig) -> Iterator[str]:
    if config.train.epochs * config.train.mini_batches > 1:
        yield "train.epochs and train.mini_batches ask for several optimizer steps, whose rows are drawn among all samples"
    if not config.distill_only and not config.advantage.group_by_group:
        ask = " (say by_group: true if it does not)" if config.advantage.kind == "import" else ""
        yield f"advantage {config.advantage.kind}, as it is set, compares with samples of other groups{ask}"
    if config.shaping.advantages.whiten:
        yield "shaping.advantages.whiten looks at the advantages of all samples"
    if config.shaping.domains == "normalised":
        yield "shaping.domains: normalised looks at the rewards of all samples"
    if config.masks.top_entropy is not None:
        yield "masks.top_entropy chooses among the tokens of all samples"
    if config.loss.selects is not None:
        yield f"loss {config.loss.kind} chooses among the tokens of all samples"
    if config.kl.adaptive is not None:
        yield "kl.adaptive sets the coefficient of a step by the KL of all its samples"
    if isinstance(config.critic, OwnCriticConfig):
        yield "critic {kind: own} learns before the policy, from all samples"
    if isinstance(config.critic, SharedCriticConfig) and config.aggregation != "token_mean":
        yield f"critic {{kind: shared}} averages over tokens and aggregation {config.aggregation} over sequences"
