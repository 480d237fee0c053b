"""Every domain's reward, as the controller calls them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reroll.config.reward_base import InProcessRewardConfig, RewardConfig
from reroll.config.rewards import ImportRewardConfig, RewardWorkersConfig, needs_process, walk
from reroll.errors import ConfigError, RewardError, RewardRaised, Violation
from reroll.observe.metrics import Stats
from reroll.rewards.base import Closes, Reports, Reward, ask
from reroll.rewards.make import RewardBuilder
from reroll.rewards.meter import RewardMeter
from reroll.rewards.workers import RewardWorkers
from reroll.runtime.base import Runtime
from reroll.types import Prompt, Score, Trajectory

_log = logging.getLogger(__name__)


class RewardCluster:
    """Judges each sample by its domain's reward, the moment the sample ends. No domain waits for another's reward."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        made: Mapping[str, Reward],
        meter: RewardMeter,
        workers: RewardWorkers | None = None,
    ) -> None:
        """`made` are the rewards and all they consist of; `workers`, which close with it, run those that need a process."""
        self._rewards = dict(rewards)
        self._made = dict(made)
        self._meter = meter
        self._workers = workers
        self._logged: set[tuple[str, str]] = set()
        """Domains and what kinds of faults their rewards had."""

    @classmethod
    async def start(
        cls,
        runtime: Runtime,
        configs: Mapping[str, RewardConfig],
        *,
        workers: RewardWorkersConfig | None = None,
        hosts: Mapping[str, Any] | None = None,
        config_folder: Path | None = None,
        run_folder: Path | None = None,
    ) -> RewardCluster:
        """Start what the rewards need and check that user code can be imported.

        `config_folder` (the YAML's) and the working directory are importable. `hosts` are the models that the run hosts to
        judge, by the name path of their reward. Judges remember what they said in `run_folder`. Raises ConfigError with
        every reward that cannot be made.
        """
        meter = RewardMeter()
        builder = RewardBuilder(
            workers=await _start_workers(runtime, configs, workers or RewardWorkersConfig(), config_folder, meter),
            hosts=hosts or {},
            config_folder=config_folder,
            run_folder=run_folder,
        )
        try:
            return cls(builder.build(configs), builder.made, meter, builder.workers)
        except BaseException:
            await _close(builder.made, builder.workers)
            raise

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Judge by the reward of the prompt's domain, else by `default`. RewardError says why there is no score."""
        reward = self._rewards.get(prompt.domain, self._rewards.get("default"))
        with self._meter.judging(prompt.domain):
            if reward is None:
                raise RewardError(f"no reward judges domain {prompt.domain}: add rewards.{prompt.domain} or rewards.default")
            try:
                return await ask(reward, prompt, trajectory)
            except RewardRaised as error:
                self._log_once(prompt.domain, error)
                raise

    def _log_once(self, domain: str, error: RewardRaised) -> None:
        if (domain, error.kind) not in self._logged:
            self._logged.add((domain, error.kind))
            told = "the reward of domain %s raised, and the sample fails: %s. More of this kind count as judging/%s/raised"
            _log.warning(told, domain, error, domain)

    def stats(self) -> Stats:
        """What happened since the last call, by domain; and what the rewards themselves count."""
        return sum((reward.stats() for reward in self._made.values() if isinstance(reward, Reports)), self._meter.stats())

    async def close(self) -> None:
        """End the processes, and let the rewards go of what they hold. Safe to call twice."""
        await _close(self._made, self._workers)


async def _close(made: Mapping[str, Reward], workers: RewardWorkers | None) -> None:
    for reward in made.values():
        if isinstance(reward, Closes):
            await reward.close()
    if workers is not None:
        await workers.close()


async def _start_workers(
    runtime: Runtime,
    configs: Mapping[str, RewardConfig],
    workers: RewardWorkersConfig,
    config_folder: Path | None,
    meter: RewardMeter,
) -> RewardWorkers | None:
    nodes = {name: node for name, node in walk(configs) if isinstance(node, InProcessRewardConfig) and needs_process(node)}
    if not nodes:
        return None
    search_path = [os.path.abspath(folder) for folder in (config_folder, Path.cwd()) if folder is not None]
    started = await RewardWorkers.start(runtime, nodes, workers, search_path=search_path, meter=meter)
    try:
        if problems := await started.problems():
            raise ConfigError([_violation(name, nodes[name], why) for name, why in problems.items()])
    except BaseException:
        await started.close()
        raise
    return started


def _violation(name: str, node: InProcessRewardConfig, why: str) -> Violation:
    if isinstance(node, ImportRewardConfig):
        fix = "the folder of the YAML and the working directory are searched: correct the path, the options or the module"
        return Violation(f"rewards.{name}.path", f"{node.path} cannot be used: {why}", fix)
    return Violation(
        f"rewards.{name}.kind", f"{node.kind} cannot be used: {why}", "install the package it names, or do what it says"
    )
