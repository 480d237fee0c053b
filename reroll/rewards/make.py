"""From the config's rewards to what the controller awaits, whatever each needs to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reroll.config.reward_base import CombinedRewardConfig, RewardConfig
from reroll.config.reward_hosted import OpenedRewardConfig
from reroll.config.rewards import needs_process
from reroll.rewards.base import Inline, Reward, RewardContext
from reroll.rewards.workers import Remote, RewardWorkers


@dataclass(slots=True, kw_only=True)
class RewardBuilder:
    """Makes rewards, and keeps all that it made, nested ones too, by their name path."""

    workers: RewardWorkers | None = None
    """Where rewards run that need a process; None if there are none."""
    hosts: Mapping[str, Any] = field(default_factory=dict)
    """Models that the run hosts, by the name path of the reward that asks them."""
    config_folder: Path | None = None
    run_folder: Path | None = None
    made: dict[str, Reward] = field(default_factory=dict)

    def build(self, configs: Mapping[str, RewardConfig]) -> dict[str, Reward]:
        """One for each entry of the config. Raises ConfigError, or what a verifier raises that cannot be made."""
        return {name: self._keep(name, node) for name, node in configs.items()}

    def _keep(self, name: str, node: RewardConfig) -> Reward:
        nested = {below: self._keep(f"{name}.{below}", part) for below, part in node.nested.items()}
        reward = self.made[name] = self._reward(name, node, list(nested.values()))
        return reward

    def _reward(self, name: str, node: RewardConfig, nested: list[Reward]) -> Reward:
        match node:
            case CombinedRewardConfig():
                made: Reward = node.implementation()(node, nested)
                return made
            case OpenedRewardConfig():
                context = RewardContext(
                    name=name, host=self.hosts.get(name), config_folder=self.config_folder, run_folder=self.run_folder
                )
                opened: Reward = node.implementation()(node, context)
                return opened
        if needs_process(node):
            assert self.workers is not None  # They were started for it.
            return Remote(name, self.workers)
        return Inline(node.make())
