"""The verifiers of reasoning-gym's tasks."""

from __future__ import annotations

from reroll.errors import RewardError, SandboxError
from reroll.rewards.base import extract
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.guarded.reasoning_gym import TaskScorer
from reroll_zoo.reasoning_gym.config import ReasoningGymRewardConfig

_SHARE_OF_TIME = 0.8
"""Of its `timeout_s` a call may spend in the sandbox: it must end before its process is killed."""
_UNLIMITED_MB = 1 << 20
"""Where the config sets no limit."""


class ReasoningGymVerifier:
    """Asks the generator that the prompt came from."""

    def __init__(self, config: ReasoningGymRewardConfig) -> None:
        self._pattern = config.pattern
        memory_mb = config.memory_mb or _UNLIMITED_MB
        self._scorer = TaskScorer(config.sandbox, wall_s=_SHARE_OF_TIME * config.timeout_s, memory_mb=memory_mb)

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        if "reasoning_gym" not in prompt.extra:
            raise RewardError(f"prompt {prompt.id} is not a reasoning-gym task: give its domain another reward")
        task = prompt.extra["reasoning_gym"]
        given = extract(trajectory.text, self._pattern)
        try:
            value = self._scorer.score(task["name"], task["options"], task["entry"], given)
        except SandboxError as error:
            raise RewardError(f"the sandbox failed: {error}") from error
        return Score(value=value, answer=None if given is None else given.strip())
