"""reasoning-gym: each generated task is an episode of one or several attempts."""

from __future__ import annotations

from typing import Any

import reasoning_gym

from reroll.envs.base import StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.guarded.reasoning_gym import TaskScorer
from reroll_zoo.reasoning_gym.config import ReasoningGymEnvConfig

_ANSWER_S, _ANSWER_MB = 8.0, 1024
"""What an answer that must be run to be scored may use."""


class ReasoningGymEnv:
    """Shows the task of a seed and scores each answer with the task's own verifier, between 0 and 1.

    An answer that is not perfect may be followed by another, up to `max_attempts`. Only the answer that the episode ends
    with is paid, so an episode earns what its last answer is worth.
    """

    def __init__(self, options: ReasoningGymEnvConfig) -> None:
        self._scorer = TaskScorer(options.sandbox, wall_s=_ANSWER_S, memory_mb=_ANSWER_MB)
        self._name = options.name
        self._options = options.options
        self._max_attempts = options.max_attempts
        self._attempts_left = 0
        self._make(0)

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The task of this seed, as one user message."""
        self._task = self._make(seed)[0]
        self._attempts_left = self._max_attempts
        return ({"role": "user", "content": self._task["question"]},)

    def step(self, action: str) -> StepResult:
        """Judge one answer."""
        if not self._attempts_left:
            raise EnvError("no episode is under way: call reset, which starts one")
        score = self._scorer.score(self._name, self._options, self._task, action.strip())
        is_right = score >= 1.0
        self._attempts_left = 0 if is_right else self._attempts_left - 1
        is_over = not self._attempts_left
        left = f"{self._attempts_left} attempt{'s' if self._attempts_left > 1 else ''} left"
        feedback = Message(role="user", content=f"That is not right. Try again: {left}.")
        return StepResult(
            messages=() if is_over else (feedback,),
            reward=score if is_over else 0.0,
            terminated=is_over,
            info={"effective": 1.0, "score": score, "success": float(is_right)},
            state=f"{self._task['question']}\n{left}",
        )

    def close(self) -> None:
        """End the episode."""
        self._attempts_left = 0

    def _make(self, seed: int) -> Any:
        try:
            return reasoning_gym.create_dataset(self._name, **{**self._options, "seed": seed, "size": 1})
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning-gym cannot make tasks of {self._name!r} with {self._options}: {error}") from error
