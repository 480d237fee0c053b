"""Writes into a run's journal what its roles do, beside its samples' lives: who holds which lease, how busy engines are,
which were lost and came back, and with what advantage each sample was trained. `reroll_zoo/samples/activity.py` reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reroll.algo.episodes import Episodes
from reroll.infer.cluster import InferCluster
from reroll.infer.worker_state import WorkerState
from reroll.observe.journal import Journal
from reroll.pipeline.base import Pipeline
from reroll.pipeline.rlvr import RlvrPipeline
from reroll.tokens.batch import Batch
from reroll.types import Group
from reroll_zoo.samples.activity import ACTIVITY, CREDITED, JOINED, LOST, RESTARTED, Advantage

TICK_S = 1.0
"""How often engines are looked at; of many, more seldom, so that what is written does not grow with them."""
_ENGINES_A_TICK = 32
MAX_RUNS = 32
"""Of a sample whose tokens have more advantages than that, the means of as many stretches are written."""


@contextmanager
def watch(pipeline: Pipeline[Any]) -> Iterator[None]:
    """Watch the run of this pipeline, if it has a journal, from its first lease on: by then the journal knows from which
    version the run goes on."""
    if not isinstance(pipeline, RlvrPipeline):
        yield
        return
    watching = RunWatch(pipeline.parts.journal, pipeline.parts.engine)
    pipeline.parts.devices.during = pipeline.context.during = watching.during
    pipeline.on_credit = watching.credited
    try:
        yield
    finally:
        watching.close()


class RunWatch:
    """Belongs to the controller's event loop."""

    def __init__(self, journal: Journal, engine: InferCluster) -> None:
        self._journal = journal
        self._engine = engine
        self._meters: dict[int, _EngineMeter] = {}
        self._was_idle = True
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def during(self, role: str) -> Iterator[None]:
        """Write when it begins and when it ends. Raises RunFolderError if the journal could not be written meanwhile."""
        if self._task is None:
            self.look(0.0)
            self._task = asyncio.create_task(self._look_again_and_again())
        if self._task.done():
            self._task.result()
        self._journal.record("", ACTIVITY, role=role, is_on=True)
        try:
            yield
        finally:
            self._journal.record("", ACTIVITY, role=role, is_on=False)

    def credited(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> None:
        """Write the advantage of each sample that has a written token: all in one event, so that one takes few bytes."""
        ids = [trajectory.id for group in groups for trajectory in group.trajectories]
        if told := dict(advantages_of(batch, episodes)):
            self._journal.record("", CREDITED, samples=[ids[number] for number in told], advantages=list(told.values()))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look_again_and_again(self) -> None:
        clock = asyncio.get_running_loop().time
        seen_s = clock()
        while True:
            await asyncio.sleep(TICK_S * max(1.0, len(self._engine.states) / _ENGINES_A_TICK))
            now_s = clock()
            self.look(now_s - seen_s)
            self._journal.flush()  # Whoever watches sees it now, also while no sample ends.
            seen_s = now_s

    def look(self, since_s: float) -> None:
        """Write what became of engines, and how busy they were in these seconds. All idle is written once."""
        busy: list[int | None] = []
        for state in self._engine.states:
            meter = self._meters.get(state.rank)
            if meter is None:
                meter = self._meters[state.rank] = _EngineMeter(state)
                fates = [JOINED] if state.has_joined and not state.is_dead else []
            else:
                fates = meter.fates(state)
            for fate in fates:
                self._journal.record("", ACTIVITY, engine=state.rank, fate=fate)
            busy.append(meter.busy_percent(since_s))
        load = [0 if state.is_dead else state.load for state in self._engine.states]
        is_idle = not any(load) and not any(busy)
        if not (is_idle and self._was_idle):
            self._journal.record("", ACTIVITY, busy=busy, load=load)
        self._was_idle = is_idle


class _EngineMeter:
    """One engine between two looks."""

    def __init__(self, state: WorkerState) -> None:
        self._state, self._was_dead = state, state.is_dead
        self._status = state.status
        self._unreported_s = 0.0

    def fates(self, state: WorkerState) -> list[str]:
        """What became of it since the last look. One that was started anew has a new state."""
        is_another = state is not self._state
        fates = [LOST] if (is_another or state.is_dead) and not self._was_dead else []
        fates += [RESTARTED] if is_another and not state.is_dead else []
        if is_another:
            self._status, self._unreported_s = None, 0.0
        self._state, self._was_dead = state, state.is_dead
        return fates

    def busy_percent(self, since_s: float) -> int | None:
        """Of the time since its last report; None while none has come of an engine at work."""
        now, before = self._state.status, self._status
        self._unreported_s += since_s
        if now is None or now is before:
            is_at_work = self._state.load > 0 and not self._state.is_dead
            if not is_at_work:
                self._unreported_s = 0.0
            return None if is_at_work else 0
        busy_s = now.busy_s - (before.busy_s if before else 0.0)
        percent = round(100 * min(1.0, busy_s / self._unreported_s)) if self._unreported_s else 0
        self._status, self._unreported_s = now, 0.0
        return percent


def advantages_of(batch: Batch, episodes: Episodes) -> Iterator[tuple[int, Advantage]]:
    """The number of each episode that has a written token, and the advantage of those tokens in their order."""
    is_written = episodes.token_turn >= 0
    numbers = episodes.turn_episode[episodes.token_turn[is_written]].numpy()
    values = batch.advantage[is_written].double().numpy()
    values = np.where(batch.loss_mask[is_written].numpy(), values, np.nan)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield int(numbers[start]), _told(values[start:end])


def _told(values: NDArray[np.float64]) -> Advantage:
    """A number where all tokens have the same, else runs of equal ones, or the means of stretches."""
    is_new = (values[1:] != values[:-1]) & ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
    starts = [0, *(np.flatnonzero(is_new) + 1)]
    if len(starts) == 1:
        return _plain(values[:1])
    if len(starts) > MAX_RUNS:
        starts = [len(values) * part // MAX_RUNS for part in range(MAX_RUNS)]
    ends = [*starts[1:], len(values)]
    return [[_plain(values[start:end]), int(end - start)] for start, end in zip(starts, ends, strict=True)]


def _plain(values: NDArray[np.float64]) -> float | None:
    """The mean of those that are in the loss, in four digits."""
    known = values[~np.isnan(values)]
    return float(f"{known.mean():.4g}") if len(known) else None
