"""The training workers of one role, as the controller sees them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from reroll.observe.metrics import Last, Stats
from reroll.runtime.base import Workers
from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance
from reroll.train.base import Loss, Needs, Predictions, join_predictions, known
from reroll.train.worker import PredictJob, TrainJob, TrainWorker


class TrainCluster:
    """A policy or a reference model, wherever its workers run."""

    def __init__(self, workers: Workers[TrainWorker]) -> None:
        self._workers = workers

    async def predict(self, batch: Batch, needs: Needs) -> Predictions:
        """What the model says about the batch. Shared out over the workers by tokens."""
        parts = balance(batch.lengths, num_parts=self._workers.size)
        jobs = [PredictJob(batch.select(part), needs) for part in parts]
        return join_predictions(batch, parts, await self._workers.scatter(TrainWorker.predict, jobs))

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
        stats = sum(await self._workers.all(TrainWorker.train, job), Stats())
        return stats.prefixed("train/") + Stats({"time/train_s": Last(time.perf_counter() - started)})

    async def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained, or those that are frozen, by Hugging Face name.

        By reference if the worker lives in this process, else a copy.
        """
        return await self._workers.one(0, TrainWorker.weights, frozen=frozen)

    async def to(self, device: str) -> None:
        """Move the workers' weights and optimizer state."""
        await self._workers.all(TrainWorker.to, device)

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` continues from and that plain transformers opens."""
        await self._workers.one(0, TrainWorker.save, folder)

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        await self._workers.all(TrainWorker.load, folder)

    async def close(self) -> None:
        """Let the workers go."""
        await self._workers.stop()
