"""GEM: its games and question sets."""

from __future__ import annotations

import gem
from gem.utils.constants import TERMINAL_STATE

from reroll.envs.base import StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.adapters.config import GemConfig
from reroll_zoo.adapters.gem_judges import contain
from reroll_zoo.adapters.global_random import GlobalRandom

SUCCESS_REWARD = 1.0
"""What GEM's environments pay for a task that was done."""


class Gem:
    """A GEM environment. What counts as a move, and what a bad one costs, is the environment's rule.

    GEM calls an episode that reached its end both terminated and truncated; here it is terminated.
    """

    def __init__(self, options: GemConfig) -> None:
        self._env_id = options.env_id
        self._boxed = options.boxed
        self._random = GlobalRandom(0)
        self._is_under_way = False
        try:
            with self._random.in_place():
                self._env = gem.make(options.env_id, **options.options)
        except Exception as error:
            raise EnvError(f"GEM cannot make {options.env_id}: {type(error).__name__}: {error}") from error
        contain(self._env, options.sandbox)

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The instance of this seed, as one user message."""
        self._random = GlobalRandom(seed)
        with self._random.in_place():
            observation, _ = self._env.reset(seed=seed % 2**32)
        self._is_under_way = True
        return ({"role": "user", "content": observation.strip()},)

    def step(self, action: str) -> StepResult:
        """Make one move."""
        if not self._is_under_way:
            raise EnvError("no episode is under way: call reset, which starts one")
        if self._boxed and "\\boxed" not in action:
            action = f"\\boxed{{{action.strip()}}}"
        with self._random.in_place():
            observation, reward, terminated, truncated, info = self._env.step(action)
        is_over = bool(terminated or truncated)
        self._is_under_way = not is_over
        # Every action uses up a turn, so all of them count as effective.
        numbers = {"effective": 1.0}
        if is_over:
            numbers["success"] = float(float(reward) >= SUCCESS_REWARD)
        shown = "\n".join(part.strip() for part in (observation, info.get("suffix", "")) if part and part != TERMINAL_STATE)
        return StepResult(
            messages=() if is_over else ({"role": "user", "content": shown},),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
            info=numbers,
        )

    def close(self) -> None:
        """End the episode."""
        self._is_under_way = False
