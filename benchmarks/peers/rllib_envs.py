"""Environment steps a second through RLlib's env runner, and in a bare Gymnasium loop. Usage: rllib_envs.py"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from env_work import GYMNASIUM_ID, IN_FLIGHT

from reroll.config.actions import TagActionConfig
from reroll.envs.actions import parse_action
from reroll_zoo.adapters.config import GymnasiumConfig
from reroll_zoo.adapters.gymnasium import Gymnasium

NUM_STEPS = 16_384
NUM_REMOTE = 2


class TextLake(gymnasium.Env):  # type: ignore[misc]
    """The environment wrapped as reroll wraps it: actions are read from words, what is seen is written out."""

    def __init__(self, config: Any = None) -> None:
        self._env = Gymnasium(GymnasiumConfig(env_id=GYMNASIUM_ID))
        self._actions = TagActionConfig(kind="tag")
        self.observation_space = gymnasium.spaces.Discrete(16)
        self.action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        # The adapter wants a seed for every episode.
        messages = self._env.reset(int(self.np_random.integers(2**31)) if seed is None else seed)
        return int(messages[-1]["content"]), {"messages": messages}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        outcome = self._env.step(parse_action(f"<answer>{action}</answer>", self._actions))
        return int(outcome.state or 0), outcome.reward, outcome.terminated, outcome.truncated, {"messages": outcome.messages}

    def close(self) -> None:
        self._env.close()


class RandomModule(TorchRLModule):  # type: ignore[misc]
    """A policy that answers at once."""

    def setup(self) -> None:
        pass

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTIONS: torch.randint(int(self.action_space.n), (len(batch[Columns.OBS]),))}


def timed(sample: Callable[[int], int], *, num_steps: int = NUM_STEPS) -> float:
    """Steps a second of `sample`, which takes at least so many and returns how many it took; warmed up before."""
    sample(num_steps // 8)
    started_s = time.perf_counter()
    num_taken = sample(num_steps)
    return num_taken / (time.perf_counter() - started_s)


def bare(num_steps: int) -> int:
    """One environment, reset again and again, with random actions."""
    env = gymnasium.make(GYMNASIUM_ID)
    env.reset(seed=0)
    for _ in range(num_steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()
    return num_steps


def configured(config: AlgorithmConfig, num_envs: int, *, env: Any = TextLake) -> AlgorithmConfig:
    return config.environment(env).env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)


def num_steps_of(episodes: list[Any]) -> int:
    return sum(len(episode) for episode in episodes)


def local(config: AlgorithmConfig, *, random_actions: bool) -> float:
    runner = SingleAgentEnvRunner(config=config)
    try:
        return timed(lambda num: num_steps_of(runner.sample(num_timesteps=num, random_actions=random_actions)))
    finally:
        runner.stop()


def remote(num_envs: int) -> float:
    """Actors that share the environments; each sends back the episodes it sampled."""
    config = configured(AlgorithmConfig(), max(1, num_envs // NUM_REMOTE))
    runner_class = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
    runners = [runner_class.remote(config=config, worker_index=1 + rank) for rank in range(NUM_REMOTE)]

    def sample(num_steps: int) -> int:
        calls = [runner.sample.remote(num_timesteps=num_steps // NUM_REMOTE, random_actions=True) for runner in runners]
        return sum(num_steps_of(episodes) for episodes in ray.get(calls))

    try:
        return timed(sample)
    finally:
        for runner in runners:
            ray.kill(runner)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init("local", num_cpus=NUM_REMOTE, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    steps_per_s = {"bare Gymnasium/1": timed(bare)}
    for num_envs in IN_FLIGHT:
        plain = configured(AlgorithmConfig(), num_envs, env=GYMNASIUM_ID)
        steps_per_s[f"RLlib, no policy, no text/{num_envs}"] = local(plain, random_actions=True)
        steps_per_s[f"RLlib, no policy/{num_envs}"] = local(configured(AlgorithmConfig(), num_envs), random_actions=True)
        with_policy = configured(PPOConfig().rl_module(rl_module_spec=RLModuleSpec(module_class=RandomModule)), num_envs)
        steps_per_s[f"RLlib/{num_envs}"] = local(with_policy, random_actions=False)
        if num_envs >= NUM_REMOTE:
            steps_per_s[f"RLlib, no policy, {NUM_REMOTE} actors/{num_envs}"] = remote(num_envs)
    ray.shutdown()
    print("RESULT " + json.dumps(steps_per_s), flush=True)


if __name__ == "__main__":
    main()
