"""The reward seam: what judges, and how the controller awaits it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from reroll.errors import RewardError
from reroll.observe.metrics import Stats
from reroll.runtime.children import last_lines
from reroll.types import Prompt, Score, Trajectory


class Verifier(Protocol):
    """Judges one trajectory by computation alone: `Kind(config)(prompt, trajectory)`.

    A wrong, empty or unreadable answer scores low; RewardError is for faults that are not the policy's (a row without a
    reference answer). Cheap and safe verifiers run where they are called; the others (`in_process` of their config node)
    run in worker processes, which kill a call at its `timeout_s`.
    """

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score: ...


class Reward(Protocol):
    """Judges one trajectory the moment it ends, as the controller awaits it. RewardError fails the sample with a reason."""

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


class Inline:
    """A verifier that runs where it is called. As in a process, what it raises fails the sample and not the run."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        try:
            return self._verifier(prompt, trajectory)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(last_lines(error)) from error
