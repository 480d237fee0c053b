"""The worker that holds a model and its strategy, and the loop of epochs, mini-batches and micro-batches, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reroll.config.parts import ModelConfig
from reroll.models.load import Head
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance, fill, micro_batches, mini_batches
from reroll.train.base import Loss, Needs, NoLoss, Predictions, join_predictions, known
from reroll.train.make import make_strategy


@dataclass(frozen=True, slots=True)
class PredictJob:
    """One question: what do you say about this batch?"""

    batch: Batch
    needs: Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One update: a batch, the loss, and how often to go through it."""

    batch: Batch
    loss: Loss
    epochs: int = 1
    mini_batches: int = 1
    """Optimizer steps per epoch, at most the number of sequences."""
    seed: int = 0
    """Of the cut into mini-batches, which differs from epoch to epoch."""


class TrainWorker:
    """Holds one model, or this rank's part of it: to train for `total_steps` optimizer steps, or, with 0, only to answer.

    `meeting` is the address where the ranks of a strategy of several find each other.
    """

    def __init__(
        self,
        info: WorkerInfo,
        config: ModelConfig,
        *,
        total_steps: int,
        head: Head = "language",
        meeting: str | None = None,
    ) -> None:
        self._home = info.device
        self._world_size = info.world_size if config.strategy.kind == "torch" else 1
        self._micro_batch_tokens = config.strategy.micro_batch_tokens
        self._strategy = make_strategy(info, config, total_steps=total_steps, head=head, meeting=meeting)

    def predict(self, job: PredictJob) -> Predictions:
        """What the model says about a batch, on the CPU. Ranks that share the model may be asked about different batches."""
        batch = job.batch
        parts = fill(batch.lengths, max_tokens=self._micro_batch_tokens)
        num_idle = self._num_idle_passes(len(parts))
        answers = [self._strategy.forward(batch.select(part), job.needs) for part in parts]
        for _ in range(num_idle):
            self._strategy.forward(batch.select([_shortest(batch.lengths)]), job.needs)
        return join_predictions(batch, parts, answers)

    def train(self, job: TrainJob) -> Stats:
        """Go through the batch, one optimizer step per mini-batch. Every rank is given the same job and takes its share.

        With a single step the policy has not moved when it meets a token, so the training pass itself gives the old
        log-probs. With several they are computed first, unless the batch brings them.
        """
        if self._world_size > 1:
            raise ValueError(f"strategy torch trains on one device, got {self._world_size}: name one in policy.devices")
        started_s = time.perf_counter()
        batch = job.batch
        if job.epochs * job.mini_batches > 1 and batch.old_logp is None and job.loss.compares_with_old_policy:
            batch = batch.replace(old_logp=self._logprobs(batch))
        stats = Stats()
        for epoch in range(job.epochs):
            for step_batch in mini_batches(batch, job.mini_batches, seed=job.seed * job.epochs + epoch):
                stats += self._step(step_batch, job.loss)
        if self._strategy.data_parallel.rank > 0:  # What was done in all is told once.
            return stats
        return stats + _throughput(batch, epochs=job.epochs, seconds=time.perf_counter() - started_s)

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained (or those that are frozen) by Hugging Face name, by reference."""
        return self._strategy.weights(frozen=frozen)

    def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move optimizer state, and weights unless told not to, to `cpu` while another role uses the device; None: back."""
        self._strategy.to(device or self._home, weights=weights)
        if self._home.startswith("cuda"):
            torch.cuda.empty_cache()  # Other processes cannot use what this one only keeps for later.

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder and the optimizer's state."""
        self._strategy.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _step(self, batch: Batch, loss: Loss) -> Stats:
        """One optimizer step. The losses of its micro-batches add up; over steps the reported loss is a mean."""
        stats = Stats({"loss": Sum(0.0)})
        batch = loss.prepare(batch)
        share = self._shares(batch.unit_lengths)[self._strategy.data_parallel.rank]
        parts = micro_batches(batch.select_units(share), max_tokens=self._micro_batch_tokens) if share else []
        num_idle = self._num_idle_passes(len(parts))
        for part in parts:
            stats += self._strategy.forward_backward(part, loss)
        for _ in range(num_idle):
            self._strategy.forward_backward(batch.select_units([_shortest(batch.unit_lengths)]), NoLoss(needs=loss.needs))
        # A rank has seen its part of the step only: together they weigh one.
        metrics = dict(stats) | {"loss": Mean(stats["loss"].value, 1 / self._strategy.data_parallel.size)}
        return Stats(metrics) + self._strategy.optim_step()

    def _logprobs(self, batch: Batch) -> Tensor:
        """The whole batch's, of which this rank computes its share."""
        shares = self._shares(batch.lengths)
        mine = shares[self._strategy.data_parallel.rank] or [_shortest(batch.lengths)]
        answers = self._strategy.data_parallel.gather(self.predict(PredictJob(batch.select(mine), Needs())))
        used = [(share, answer) for share, answer in zip(shares, answers, strict=True) if share]
        return known(join_predictions(batch, *zip(*used, strict=True)).logp)

    def _shares(self, lengths: Sequence[int]) -> list[list[int]]:
        """What each rank takes of so many rows, balanced by tokens; nothing, where there are more ranks than rows."""
        size = self._strategy.data_parallel.size
        shares = balance(lengths, num_parts=min(size, len(lengths)))
        return shares + [[] for _ in range(size - len(shares))]

    def _num_idle_passes(self, num_passes: int) -> int:
        """Ranks gather each other's weights in every pass, so all must make as many as the one with the most. Asked first."""
        return self._strategy.data_parallel.largest(num_passes) - num_passes


def _shortest(lengths: Sequence[int]) -> int:
    return min(range(len(lengths)), key=lengths.__getitem__)


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
