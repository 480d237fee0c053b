"""Where user rewards run, and how the controller reaches every reward."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from reroll.config.rewards import ExactReward, ImportReward, NumericReward, ReasoningGymReward, RewardConfig
from reroll.errors import ConfigError, RewardError, Violation
from reroll.observe.metrics import Max, Mean, Metric, Stats, Sum
from reroll.rewards.base import Reward
from reroll.rewards.match import Exact, Numeric
from reroll.rewards.pool import ProcessPool, ProcessReward
from reroll.runtime.base import Placement, Runtime, WorkerInfo, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.types import Prompt, Score, Trajectory


class RewardWorker:
    """Runs the rewards that need processes of their own. Serves as many calls at once as it has processes."""

    def __init__(
        self, info: WorkerInfo, rewards: Mapping[str, ProcessReward], *, num_processes: int, search_path: Sequence[str]
    ) -> None:
        self._pool = ProcessPool(rewards, num_processes=num_processes, search_path=search_path)

    def score(self, domain: str, prompt: Prompt, trajectory: Trajectory) -> Score:
        """A finite score; RewardError with the reason for anything else, a hang or a crash included."""
        return self._pool.score(domain, prompt, trajectory)

    def problems(self) -> dict[str, str]:
        """Domains whose reward cannot be imported, and why."""
        return self._pool.problems()

    def close(self) -> None:
        self._pool.close()


class RewardCluster:
    """Every domain's reward, as the controller calls them.

    Comparisons run where they are called; user code and verifiers run in a worker's processes. Without such rewards no
    worker is spawned.
    """

    def __init__(self, configs: Mapping[str, RewardConfig]) -> None:
        self._configs = dict(configs)
        self._inline = _inline_rewards(configs)
        self._workers: Workers[RewardWorker] | None = None
        self._latency_s = Mean(0.0, 0.0)
        self._longest_s = 0.0
        self._num_scored: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()

    @classmethod
    async def start(
        cls,
        runtime: Runtime,
        configs: Mapping[str, RewardConfig],
        *,
        config_folder: Path | None = None,
        num_processes: int | None = None,
    ) -> RewardCluster:
        """Spawn what the rewards need and check that user code can be imported.

        `config_folder` (the YAML's) and the working directory are importable. Raises ConfigError with every reward that
        cannot be imported.
        """
        cluster = cls(configs)
        remote = {name: config for name, config in configs.items() if isinstance(config, ImportReward | ReasoningGymReward)}
        if remote:
            num_processes = num_processes or num_usable_cores()
            folders = [config_folder] if config_folder else []
            search_path = [os.path.abspath(folder) for folder in (*folders, Path.cwd())]
            placement = Placement("reward", ("cpu",), concurrency=num_processes)
            cluster._workers = await runtime.spawn(
                RewardWorker, placement, remote, num_processes=num_processes, search_path=search_path
            )
            await cluster.check()
        return cluster

    async def check(self) -> None:
        """Raise ConfigError with every user reward that cannot be imported."""
        if self._workers is None:
            return
        problems = await self._workers.one(0, RewardWorker.problems)
        if problems:
            raise ConfigError([_violation(domain, self._configs[domain], why) for domain, why in problems.items()])

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Judge by the reward of the prompt's domain, else by `default`. RewardError says why there is no score."""
        start_s = time.monotonic()
        try:
            score = await self._score(prompt, trajectory)
        except RewardError:
            self._num_failed[prompt.domain] += 1
            raise
        finally:
            elapsed_s = time.monotonic() - start_s
            self._latency_s += Mean(elapsed_s)
            self._longest_s = max(self._longest_s, elapsed_s)
        self._num_scored[prompt.domain] += 1
        return score

    def stats(self) -> Stats:
        """What happened since the last call: latency, and scores and failures by domain."""
        metrics: dict[str, Metric] = {}
        if self._latency_s.weight:
            metrics = {"reward/latency_s": self._latency_s, "reward/latency_max_s": Max(self._longest_s)}
        for domain in sorted({*self._num_scored, *self._num_failed}):
            metrics[f"reward/{domain}/scored"] = Sum(self._num_scored[domain])
            metrics[f"reward/{domain}/failed"] = Sum(self._num_failed[domain])
        self._latency_s, self._longest_s = Mean(0.0, 0.0), 0.0
        self._num_scored.clear()
        self._num_failed.clear()
        return Stats(metrics)

    async def _score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        name = prompt.domain if prompt.domain in self._configs else "default"
        if name in self._inline:
            return self._inline[name](prompt, trajectory)
        if name in self._configs and self._workers is not None:
            return await self._workers.one(0, RewardWorker.score, name, prompt, trajectory)
        raise RewardError(f"no reward judges domain {prompt.domain}: add rewards.{prompt.domain} or rewards.default")


def _inline_rewards(configs: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    rewards: dict[str, Reward] = {}
    for name, config in configs.items():
        if isinstance(config, ExactReward):
            rewards[name] = Exact(config)
        elif isinstance(config, NumericReward):
            rewards[name] = Numeric(config)
    return rewards


def _violation(domain: str, config: RewardConfig, why: str) -> Violation:
    if isinstance(config, ImportReward):
        fix = "the folder of the YAML and the working directory are searched: correct the path or the module"
        return Violation(f"rewards.{domain}.path", f"{config.path} cannot be imported: {why}", fix)
    return Violation(f"rewards.{domain}.kind", f"reasoning_gym cannot be imported: {why}", "pip install 'reroll[data]'")
