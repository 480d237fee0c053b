"""The reward seam: what judges, how it is asked, and what counts as its verdict."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reroll.config.rewards import EnvRewardConfig
from reroll.errors import RewardError, RewardRaised, place_of, short_error
from reroll.observe.metrics import Stats
from reroll.types import Prompt, Score, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a reward that lives as long as the run (`OpenedRewardConfig`) is told of it."""

    name: str
    """Its path in the config, below `rewards`."""
    host: Any = None
    """The model that the run hosts for it, as its config's `hosts` gave it."""
    config_folder: Path | None = None
    """Where the YAML lies; None: there is none."""
    run_folder: Path | None = None
    """What it remembers beyond the run belongs here; None: there is no run."""


class Verifier(Protocol):
    """Judges one trajectory by computation alone: `Kind(config)(prompt, trajectory)`.

    A wrong, empty or unreadable answer scores low; RewardError is for faults that are not the policy's (a row without a
    reference answer). Cheap and safe verifiers run where they are called; the others (`in_process` of their config node)
    run in worker processes, which kill a call at its `timeout_s`.
    """

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score: ...


class Reward(Protocol):
    """Judges one trajectory the moment it ends. RewardError says why there is no score. Call it through `ask` alone."""

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score: ...


@runtime_checkable
class Closes(Protocol):
    """A reward that holds something."""

    async def close(self) -> None:
        """Let go of it. Safe to call twice."""


@runtime_checkable
class Reports(Protocol):
    """A reward that counts what it does."""

    def stats(self) -> Stats:
        """What happened since the last call."""


class EnvReward:
    """What the environment gave, or the agent reported."""

    def __init__(self, config: EnvRewardConfig) -> None:
        pass

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        return trajectory.score


class Inline:
    """A verifier that runs where it is called. One that is async is awaited; one that holds something is closed."""

    def __init__(self, verifier: Callable[[Prompt, Trajectory], Any]) -> None:
        self._verifier = verifier

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        verdict = self._verifier(prompt, trajectory)
        return await verdict if inspect.isawaitable(verdict) else verdict  # type: ignore[no-any-return]

    async def close(self) -> None:
        held: object = self._verifier
        if isinstance(held, Closes):
            await held.close()


async def ask(reward: Reward, prompt: Prompt, trajectory: Trajectory) -> Score:
    """The reward's verdict, finite; RewardError for anything else, whatever the reward raised.

    No text of a policy may end a run, and a policy finds every text that makes some line of code raise. A fault that hits
    every sample ends the run all the same: too many of them fail.
    """
    try:
        return as_score(await reward(prompt, trajectory))
    except RewardError:
        raise
    except Exception as error:
        raise raised(error) from error


def raised(error: BaseException) -> RewardRaised:
    """What a reward raised that it should not have, as the reason why a sample has no score."""
    return RewardRaised(short_error(error), kind=f"{type(error).__name__}{place_of(error)}")


def as_score(verdict: object) -> Score:
    """What a reward returned, as a Score of finite numbers and plain text. Raises RewardError for anything else."""
    if not isinstance(verdict, Score):
        return Score(value=_finite(verdict, "value"))
    parts, weights = _all_finite(verdict.parts, "part"), _all_finite(verdict.weights, "weight of part")
    if unknown := weights.keys() - parts.keys():
        raise RewardError(f"the reward weighs {sorted(unknown)[0]}, which is none of its parts: name it in parts")
    if not isinstance(verdict.answer, str | None):
        raise RewardError(f"the reward's answer is a {type(verdict.answer).__name__}: return text or None")
    return Score(
        value=_finite(verdict.value, "value"),
        parts=parts,
        weights=weights,
        info=_all_finite(verdict.info, "info"),
        answer=verdict.answer if verdict.answer is None else str(verdict.answer),
    )


def _all_finite(named: Mapping[str, object], what: str) -> dict[str, float]:
    return {str(name): _finite(number, f"{what} {name}") for name, number in named.items()}


def _finite(number: object, what: str) -> float:
    if type(number) is float and math.isfinite(number):  # As nearly all are: the look below takes longer than some verdicts.
        return number
    if not isinstance(number, numbers.Real | np.bool_):
        raise RewardError(f"the reward's {what} is a {type(number).__name__}: return a number or a Score")
    try:
        value = float(number)
    except OverflowError:  # A whole number may have any number of digits.
        raise RewardError(f"the reward's {what} is too large for a float: return a finite number") from None
    if not math.isfinite(value):
        raise RewardError(f"the reward's {what} is {value}: return a finite number")
    return value


def reference(prompt: Prompt) -> str:
    """The reference answer, which these rewards cannot do without."""
    if prompt.answer is None:
        raise RewardError(f"prompt {prompt.id} has no reference answer: set answer_key of its source, or use another reward")
    return prompt.answer


def extract(text: str, pattern: str | None) -> str | None:
    """The answer in a text: the first group (or all) of the pattern's last match; all of the text without a pattern."""
    if pattern is None:
        return text
    last = last_match(re.compile(pattern), text)
    if last is None:
        return None
    return last[1] if last.re.groups else last[0]


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Where a pattern matches last; None if it does nowhere."""
    kept = deque(pattern.finditer(text), maxlen=1)
    return kept[0] if kept else None
