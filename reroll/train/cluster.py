"""The training workers of one role, as the controller sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from reroll.errors import WorkerDied, WorkerError
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.runtime.base import Workers
from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance
from reroll.train.base import Loss, Needs, Predictions, join_predictions, known
from reroll.train.parallel.ranks import MeetingPoint
from reroll.train.shares import train_jobs
from reroll.train.worker import PredictJob, TrainWorker
from reroll.weights.parcel import Channel, Parcel, Place, Seat

T = TypeVar("T")
J = TypeVar("J")

GRACE_S = 15.0
"""When one rank has failed the others may be waiting for it: after this long they are ended."""
MAX_PAUSE_S = 1.0
"""Between two questions whether a checkpoint is written."""


class TrainCluster:
    """A policy or a reference model, wherever its workers run.

    Each `ranks_per_share` neighbouring workers are given the same data. `meeting` is where the workers found each other.
    """

    def __init__(self, workers: Workers[TrainWorker], *, ranks_per_share: int = 1, meeting: MeetingPoint | None = None) -> None:
        self._workers, self._ranks_per_share, self._meeting = workers, ranks_per_share, meeting

    async def predict(self, batch: Batch, needs: Needs) -> Predictions:
        """What the model says about the batch. Shared out over the workers by tokens."""
        num_shares = self._workers.size // self._ranks_per_share
        parts = balance(batch.lengths, num_parts=min(num_shares, len(batch)))
        jobs = [PredictJob(batch.select(part), needs) for part in parts]
        # Where there are more workers than sequences, some are asked only so that they take part.
        jobs += [PredictJob(batch.select([0]), needs)] * (num_shares - len(parts))
        answers = await self._together(self._workers.deal(TrainWorker.predict, self._for_all(jobs)))
        return join_predictions(batch, parts, answers[:: self._ranks_per_share][: len(parts)])

    async def logprobs(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """[T] fp32 log-probs of the batch's tokens; 0 off the loss mask."""
        return known((await self.predict(batch, Needs(adapter=adapter))).logp)

    async def values(self, batch: Batch) -> Tensor:
        """[T] what the scalar head expects before each token of the loss mask."""
        return known((await self.predict(batch, Needs(logp=False, value=True))).value)

    async def train(self, batch: Batch, loss: Loss, *, epochs: int = 1, mini_batches: int = 1, seed: int = 0) -> Stats:
        """Go through the batch `epochs` times, in so many optimizer steps each; see `train_jobs` for who gets what.

        With a single step the policy has not moved when it meets a token, so the training pass itself gives the old
        log-probs. With several they are asked for first, unless the batch brings them.
        """
        started_s = time.perf_counter()
        if epochs * mini_batches > 1 and batch.old_logp is None and loss.compares_with_old_policy:
            batch = batch.replace(old_logp=await self.logprobs(batch))
        num_shares = self._workers.size // self._ranks_per_share
        jobs = train_jobs(batch, loss, epochs=epochs, steps_per_epoch=mini_batches, seed=seed, num_shares=num_shares)
        told = await self._together(self._workers.deal(TrainWorker.train, self._for_all(jobs)))
        seconds = time.perf_counter() - started_s
        stats = sum(told[:: self._ranks_per_share], Stats()) + _throughput(batch, epochs=epochs, seconds=seconds)
        return stats.prefixed("train/") + Stats({"time/train_s": Last(seconds)})

    async def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained, or those that are frozen, by Hugging Face name.

        By reference if the worker lives in this process, else a copy.
        """
        return (await self._together(self._workers.each(TrainWorker.weights, frozen=frozen)))[0]

    async def places(self) -> list[Place]:
        """Where each worker is."""
        return await self._together(self._workers.each(TrainWorker.place))

    async def open_outbox(self, channel: Channel, *, seat: Seat | None) -> None:
        """Send weights through this channel from now on. `seat` is the first worker's in the channel's group."""
        seated = replace(channel, seat=seat)
        await self._together(
            self._workers.one(rank, TrainWorker.open_outbox, channel if rank else seated) for rank in range(self._workers.size)
        )

    async def begin_push(self, *, version: int, base_version: int | None) -> list[Parcel | None]:
        """The first parcels of this version, as `next_parcels` gives the others."""
        calls = self._workers.each(TrainWorker.begin_push, version=version, base_version=base_version)
        return await self._together(calls)

    async def next_parcels(self) -> list[Parcel | None]:
        """What each worker has shipped next, by rank; None from those that do not send, and from all after the last."""
        return await self._together(self._workers.each(TrainWorker.next_parcel))

    async def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move the workers' optimizer state, and their weights unless told not to; None: back to their own devices."""
        await self._together(self._workers.each(TrainWorker.to, device, weights=weights))

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` continues from and that plain transformers opens."""
        await self._together(self._workers.each(TrainWorker.save, folder))

    async def stage(self, folder: Path) -> None:
        """Take the checkpoint that `save` would write now; it is written while the workers are used. See `written`."""
        await self._together(self._workers.each(TrainWorker.stage, folder))

    async def written(self) -> None:
        """Wait until what was staged is on disk. Raises what kept it from getting there, once no rank writes any more.

        Workers are asked now and then, between other calls: one that waited in a worker would keep it from training.
        """
        pause_s, failed_s = 0.01, float("inf")
        while True:
            told = await asyncio.gather(*self._workers.each(TrainWorker.is_written), return_exceptions=True)
            errors = [answer for answer in told if isinstance(answer, BaseException)]
            if errors:
                failed_s = min(failed_s, time.perf_counter())
            if False not in told or time.perf_counter() > failed_s + GRACE_S:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if errors:
            raise min(errors, key=_distance_from_cause)

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        await self._together(self._workers.each(TrainWorker.load, folder))

    async def close(self) -> None:
        """Let the workers go."""
        await self._workers.stop()

    def _for_all(self, jobs: Iterable[J]) -> list[J]:
        """The job of each worker: neighbours that share rows are given the same one."""
        return [job for job in jobs for _ in range(self._ranks_per_share)]

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


def _throughput(batch: Batch, *, epochs: int, seconds: float) -> Stats:
    tokens = float(batch.num_tokens)
    return Stats(
        {
            "tokens": Sum(tokens * epochs),
            "loss_tokens": Sum(float(batch.num_loss_tokens) * epochs),
            "tokens_per_s": Mean(tokens * epochs, seconds),
            "padding_avoided": Mean(len(batch) * max(batch.lengths) - tokens, len(batch) * max(batch.lengths)),
        }
    )
