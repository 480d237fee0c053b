"""GEM: its games and question sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gem
from gem.utils.constants import TERMINAL_STATE

from reroll.envs.adapters.global_random import GlobalRandom
from reroll.envs.base import Outcome
from reroll.errors import EnvError
from reroll.types import Message

SUCCESS_REWARD = 1.0
"""What GEM's environments pay for a task that was done."""


class Gem:
    """A GEM environment. What counts as a move, and what a bad one costs, is the environment's rule.

    GEM calls an episode that reached its end both terminated and truncated; here it is terminated.
    """

    def __init__(self, *, env_id: str, options: Mapping[str, Any] | None = None, boxed: bool = True) -> None:
        self._env_id = env_id
        self._boxed = boxed
        self._random = GlobalRandom(0)
        self._is_under_way = False
        try:
            with self._random.in_place():
                self._env = gem.make(env_id, **(options or {}))
        except Exception as error:
            raise EnvError(f"GEM cannot make {env_id}: {type(error).__name__}: {error}") from error

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The instance of this seed, as one user message."""
        self._random = GlobalRandom(seed)
        with self._random.in_place():
            observation, _ = self._env.reset(seed=seed % 2**32)
        self._is_under_way = True
        return ({"role": "user", "content": observation.strip()},)

    def step(self, action: str) -> Outcome:
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
        return Outcome(
            messages=() if is_over else ({"role": "user", "content": shown},),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
            info=numbers,
        )

    def close(self) -> None:
        """End the episode, and the process that some environments grade answers in."""
        self._is_under_way = False
        pool = vars(self._env).get("mp_pool")
        if pool is not None:
            pool.terminate()
