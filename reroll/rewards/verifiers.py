"""From a config node to what judges by computation alone. What a kind needs is imported when the first of it is made."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from reroll.config.imports import import_object
from reroll.config.reward_base import Judged
from reroll.config.rewards import ImportReward
from reroll.errors import RewardError
from reroll.rewards.base import Verifier
from reroll.types import Prompt, Score, Trajectory

Judge = Callable[[Prompt, Trajectory], Any]
"""Gives what `as_score` takes, or something to await that gives it."""

VERIFIERS: dict[str, tuple[str, str]] = {
    "exact": ("reroll.rewards.match", "Exact"),
    "numeric": ("reroll.rewards.match", "Numeric"),
    "math": ("reroll.rewards.math", "Math"),
    "choice": ("reroll.rewards.text_choice", "Choice"),
    "f1": ("reroll.rewards.text", "F1"),
    "substring": ("reroll.rewards.text", "Substring"),
    "regex": ("reroll.rewards.text", "Regex"),
    "json_schema": ("reroll.rewards.text_json", "JsonSchema"),
    "instructions": ("reroll.rewards.instructions.verifier", "Instructions"),
    "reasoning_gym": ("reroll.rewards.reasoning_gym", "ReasoningGym"),
    "overlong": ("reroll.rewards.penalties", "Overlong"),
    "repetition": ("reroll.rewards.penalties", "Repetition"),
    "language": ("reroll.rewards.penalties", "Language"),
    "length": ("reroll.rewards.penalties", "Length"),
    "earned": ("reroll.rewards.stack", "Earned"),
}
"""Module and class, by kind. The class takes its config node."""


def make_verifier(node: Judged) -> Verifier:
    """The bundled verifier that the node describes. Raises what its module or its class raises."""
    module, name = VERIFIERS[node.kind]
    made: Verifier = getattr(import_module(module), name)(node)
    return made


def make_judge(node: Judged) -> Judge:
    """As `make_verifier`; and a function of the user's."""
    return _imported(node) if isinstance(node, ImportReward) else make_verifier(node)


def _imported(node: ImportReward) -> Judge:
    function = import_object(node.path)
    if not callable(function):
        raise TypeError(f"{node.path} is {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, None, **node.options)
    except TypeError as error:
        raise TypeError(f"{node.path} cannot be called with (prompt, trajectory) and its options: {error}") from None
    except ValueError:  # Some functions written in C do not tell what they take.
        pass
    return lambda prompt, trajectory: function(prompt, trajectory, **node.options)


def as_score(verdict: object) -> Score:
    """What a reward returned, as a finite Score. Raises RewardError for anything else."""
    if isinstance(verdict, Score):
        parts = {name: _finite(part, f"part {name}") for name, part in verdict.parts.items()}
        return replace(verdict, value=_finite(verdict.value, "value"), parts=parts)
    return Score(value=_finite(verdict, "value"))


def _finite(number: object, what: str) -> float:
    if not isinstance(number, numbers.Real | np.bool_):
        raise RewardError(f"the reward's {what} is a {type(number).__name__}: return a number or a Score")
    value = float(number)
    if not math.isfinite(value):
        raise RewardError(f"the reward's {what} is {value}: return a finite number")
    return value
