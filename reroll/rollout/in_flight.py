"""What is in flight between admission and training: groups, and the tokens of their unfinished samples."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from reroll.observe.journal import Journal, SampleState
from reroll.rollout.admission import AdmittedGroup
from reroll.types import Completion, FinishReason, Group, Prompt, Request, Trajectory


@dataclass(slots=True, eq=False)
class GroupInFlight:
    """A group between admission and training: its samples' tasks, and the trajectories of those that ended."""

    admitted: AdmittedGroup[Prompt]
    admitted_s: float
    trajectories: list[Trajectory | None]
    num_left: int
    group_size: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    finished_s: float = 0.0
    ended: list[int] = field(default_factory=list)
    """Indices of usable siblings, in the order in which they ended."""
    is_stopped: bool = False
    has_baseline: bool = False
    """The last sample is the greedy one, whose reward is the group's baseline."""

    def sample_id(self, index: int) -> str:
        return f"{self.admitted.number}.{index}"

    @property
    def has_enough(self) -> bool:
        """Whether `group_size` siblings are usable, and the baseline sample, if there is one, has ended."""
        is_baseline_awaited = self.has_baseline and self.trajectories[-1] is None
        return not is_baseline_awaited and len(self.ended) >= self.group_size

    def group(self) -> Group:
        usable = [trajectory for trajectory in self.trajectories if trajectory and trajectory.is_usable]
        baseline = self.trajectories[-1] if self.has_baseline else None
        return Group(
            number=self.admitted.number,
            prompt=self.admitted.prompt,
            trajectories=tuple(trajectory for trajectory in usable if trajectory is not baseline),
            version=self.admitted.version,
            baseline=baseline.reward if baseline and baseline.is_usable else None,
        )

    def ended_samples(self) -> dict[int, Trajectory]:
        """The usable samples, by index."""
        return {index: one for index, one in enumerate(self.trajectories) if one is not None and one.is_usable}

    def rewards(self) -> dict[int, float]:
        return {index: one.reward for index, one in self.ended_samples().items()}

    def whole(self) -> list[int]:
        """Indices of the samples that have not failed, ended or not."""
        return [index for index, one in enumerate(self.trajectories) if one is None or one.is_usable]


TellingGenerate = Callable[[Request, Callable[[NDArray[np.uint32], NDArray[np.float64], int], None]], Awaitable[Completion]]
"""Requests one completion; the second argument is called with tokens, log-probs and version as they are generated."""


class TokenKeeper:
    """A layer between the episodes of a run and its engines.

    An episode that is played again requests the same completions under the same ids. As long as the prompts are the same as
    the first time, it gets the recorded tokens: finished turns at once, and the interrupted turn is continued. So an
    environment that replies deterministically needs no snapshot. If a prompt differs, tokens are drawn anew from that turn on.
    """

    def __init__(self, journal: Journal, generate: TellingGenerate) -> None:
        self._journal = journal
        self._generate = generate
        self._serials = count()

    async def generate(self, request: Request) -> Completion:
        """The completion of this request. Cancelling the call aborts the request, and keeps the tokens reported so far."""
        tokens = self._journal.partial
        turn, num_diverged = tokens.turn(request)
        if num_diverged:
            sample_id, reason = request.id.rpartition(".")[0], "the policy was told something else than the last time"
            self._journal.record(sample_id, SampleState.GENERATING, discarded=num_diverged, reason=reason)
        completion = turn.completion()
        if completion is not None:
            return completion
        # A new id for each try: an engine may still be aborting an earlier one.
        asked = replace(request, id=f"{request.id}#{next(self._serials)}", written=turn.written())
        completion = await self._generate(asked, partial(tokens.add, request.id, turn))
        if completion.finish_reason is not FinishReason.ABORT:
            tokens.end(turn, completion)
        return completion
