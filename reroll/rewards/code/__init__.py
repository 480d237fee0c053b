"""The code reward: programs as answers, judged by tests in a sandbox. `Code` is all that others need."""

from reroll.rewards.code.reward import Code

__all__ = ["Code"]
