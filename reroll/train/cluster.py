"""The training workers of one role, as the controller sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from reroll.errors import WorkerDied, WorkerError
from reroll.observe.metrics import Last, Stats
from reroll.runtime.base import Workers
from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance
from reroll.train.base import Loss, Needs, Predictions, join_predictions, known
from reroll.train.parallel.ranks import MeetingPoint
from reroll.train.worker import PredictJob, TrainJob, TrainWorker

T = TypeVar("T")

GRACE_S = 15.0
"""When one rank has failed the others may be waiting for it: after this long they are ended."""


class TrainCluster:
    """A policy or a reference model, wherever its workers run.

    Each `tp` neighbouring workers are given the same data. `meeting` is where the workers found each other.
    """

    def __init__(self, workers: Workers[TrainWorker], *, tp: int = 1, meeting: MeetingPoint | None = None) -> None:
        self._workers, self._tp, self._meeting = workers, tp, meeting

    async def predict(self, batch: Batch, needs: Needs) -> Predictions:
        """What the model says about the batch. Shared out over the workers by tokens."""
        num_shares = self._workers.size // self._tp
        parts = balance(batch.lengths, num_parts=min(num_shares, len(batch)))
        jobs = [PredictJob(batch.select(part), needs) for part in parts]
        # Where there are more workers than sequences, some are asked only so that they take part.
        jobs += [PredictJob(batch.select([0]), needs)] * (num_shares - len(parts))
        answers = await self._together(
            self._workers.one(rank, TrainWorker.predict, jobs[rank // self._tp]) for rank in range(self._workers.size)
        )
        return join_predictions(batch, parts, answers[:: self._tp][: len(parts)])

    async def logprobs(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """[T] fp32 log-probs of the batch's tokens; 0 off the loss mask."""
        return known((await self.predict(batch, Needs(adapter=adapter))).logp)

    async def values(self, batch: Batch) -> Tensor:
        """[T] what the scalar head expects before each token of the loss mask."""
        return known((await self.predict(batch, Needs(logp=False, value=True))).value)

    async def train(self, batch: Batch, loss: Loss, *, epochs: int = 1, mini_batches: int = 1, seed: int = 0) -> Stats:
        """Update the policy; see `TrainWorker.train`."""
        job = TrainJob(batch=batch, loss=loss, epochs=epochs, mini_batches=mini_batches, seed=seed)
        started = time.perf_counter()
        told = await self._together(self._workers.each(TrainWorker.train, job))
        stats = sum(told[:: self._tp], Stats())
        return stats.prefixed("train/") + Stats({"time/train_s": Last(time.perf_counter() - started)})

    async def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained, or those that are frozen, by Hugging Face name.

        By reference if the worker lives in this process, else a copy.
        """
        return (await self._together(self._workers.each(TrainWorker.weights, frozen=frozen)))[0]

    async def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move the workers' optimizer state, and their weights unless told not to; None: back to their own devices."""
        await self._together(self._workers.each(TrainWorker.to, device, weights=weights))

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` continues from and that plain transformers opens."""
        await self._together(self._workers.each(TrainWorker.save, folder))

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        await self._together(self._workers.each(TrainWorker.load, folder))

    async def close(self) -> None:
        """Let the workers go."""
        await self._workers.stop()

    async def _together(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of a call that every worker takes part in.

        If one fails, the others may wait for it in vain. They are given a moment to fail too and are then ended, and the
        error raised is the one that tells most of the cause.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=GRACE_S)
            errors = [error for task in tasks if task.done() and (error := task.exception())]
            if pending:
                await self._workers.stop()
                await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        if errors:
            raise min(errors, key=_distance_from_cause)
        return [task.result() for task in tasks]


def _distance_from_cause(error: BaseException) -> int:
    """A lost process makes its partners fail too, with errors of the network; so does an error of ours."""
    if isinstance(error, WorkerDied):
        return 0
    return 2 if isinstance(error, WorkerError) else 1
