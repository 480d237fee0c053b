"""The models of a run, wherever in its config they stand."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.algorithm import OwnCriticConfig
from reroll.config.distill import DistillConfig
from reroll.config.parts import FixedModelConfig
from reroll.config.reward_hosted import HostedJudgeConfig, ModelRewardConfig, OpenedRewardConfig
from reroll.config.rewards import walk
from reroll.config.tree import AnyConfig, RlvrConfig


def named_models(config: AnyConfig) -> Iterator[tuple[str, FixedModelConfig | HostedJudgeConfig]]:
    """(path, config) of every model of the run."""
    yield "policy", config.policy
    if isinstance(config, DistillConfig):
        yield "teacher", config.teacher
    if isinstance(config, RlvrConfig):
        if isinstance(config.critic, OwnCriticConfig):
            yield "critic", config.critic
        for name, teacher in config.teachers.items():
            yield f"teachers.{name}", teacher
        for name, node in walk(config.rewards):
            if isinstance(node, ModelRewardConfig):
                yield f"rewards.{name}", node
            elif isinstance(node, OpenedRewardConfig) and node.hosted is not None:
                yield f"rewards.{name}.model", node.hosted
