"""The reward seam."""

from __future__ import annotations

from typing import Protocol

from reroll.types import Prompt, Score, Trajectory


class Reward(Protocol):
    """Judges one trajectory the moment it ends. Raise RewardError (or anything) to fail the sample with a reason."""

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score: ...
