"""From a config node to what judges by computation alone. What a kind needs is imported when the first of it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reroll.config.reward_base import RewardConfig
from reroll.types import Prompt, Trajectory

Judge = Callable[[Prompt, Trajectory], Any]
"""Gives what `base.as_score` takes, or something to await that gives it."""


def make_judge(node: RewardConfig) -> Judge:
    """A verifier, or a function of the user's. Raises what its module or its class raises."""
    judge: Judge = node.make()
    return judge
