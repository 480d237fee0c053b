"""The worker that holds a model and its strategy, and the loop of optimizer steps and micro-batches, written once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reroll.config.parts import ModelConfig
from reroll.models.heads import SCORE
from reroll.models.load import Head
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch
from reroll.tokens.packing import fill, micro_batches
from reroll.train.base import Loss, Needs, NoLoss, Predictions, join_predictions
from reroll.train.make import make_strategy
from reroll.train.shares import Share, TrainJob, shortest
from reroll.train.staging import in_background
from reroll.weights.outbox import Outbox
from reroll.weights.parcel import Channel, Parcel, Place, place_of


@dataclass(frozen=True, slots=True)
class PredictJob:
    """One question: what do you say about this batch?"""

    batch: Batch
    needs: Needs


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
        self._home, self._rank = info.device, info.rank
        self._world_size = info.world_size if config.strategy.kind == "torch" else 1
        self._pass_tokens = config.strategy.pass_tokens
        self._strategy = make_strategy(info, config, total_steps=total_steps, head=head, meeting=meeting)
        self._stays = self._strategy.holds_whole and config.offload != "all"
        """Whether its weights are always where they are now."""
        self._writing: Future[None] | None = None
        self._outbox: Outbox | None = None
        self._gathering: Generator[tuple[str, Tensor]] | None = None
        self._parcels: Iterator[Parcel | None] = iter(())

    def predict(self, job: PredictJob) -> Predictions:
        """What the model says about a batch, on the CPU. Ranks that share the model may be asked about different batches."""
        batch = job.batch
        parts = fill(batch.lengths, max_tokens=self._pass_tokens)
        num_idle = self._num_idle_passes(len(parts))
        answers = [self._strategy.forward(batch.select(part), job.needs) for part in parts]
        for _ in range(num_idle):
            self._strategy.forward(batch.select([shortest(batch.lengths)]), job.needs)
        return join_predictions(batch, parts, answers)

    def train(self, job: TrainJob) -> Stats:
        """This rank's part of an update. Every rank is given as many steps, and takes them together with the others.

        Where a batch has no `old_logp`, the policy has not moved yet when it meets a token: the training pass itself gives it.
        """
        if self._world_size > 1:
            raise ValueError(f"strategy torch trains on one device, got {self._world_size}: name one in policy.devices")
        return sum((self._step(share, job.loss) for share in job.steps), Stats())

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained (or those that are frozen) by Hugging Face name, by reference."""
        return self._strategy.weights(frozen=frozen)

    def place(self) -> Place:
        """Where this process is: who can see its memory."""
        return place_of(self._home)

    def open_outbox(self, channel: Channel) -> None:
        """From now on weights are sent through this channel."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = Outbox(channel, rank=self._rank, device=self._home)

    def begin_push(self, *, version: int, base_version: int | None) -> Parcel | None:
        """The first parcel of this version; see `Outbox.parcels` and `next_parcel`."""
        if self._outbox is None:
            raise ValueError("there is no channel to send weights through: call open_outbox first")
        if self._gathering is not None:
            self._gathering.close()  # Of a push that broke off.
        self._gathering = self._strategy.gathered()
        # An engine generates: it knows nothing of a critic's head.
        tensors = ((name, tensor) for name, tensor in self._gathering if not name.startswith(f"{SCORE}."))
        self._parcels = self._outbox.parcels(tensors, version=version, base_version=base_version, lasting=self._stays)
        return self.next_parcel()

    def next_parcel(self) -> Parcel | None:
        """Gather the next bucket together with the other ranks, and ship it if this rank sends. None after the last one."""
        return next(self._parcels, None)

    def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move optimizer state, and weights unless told not to, to `cpu` while another role uses the device; None: back."""
        self._strategy.to(device or self._home, weights=weights)
        if device == "cpu" and self._home.startswith("cuda"):
            torch.cuda.empty_cache()  # Other processes cannot use what this one only keeps for later.

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder and the optimizer's state."""
        self._strategy.save(folder)

    def stage(self, folder: Path) -> None:
        """Copy what `save` would write now, and write it while other calls are served: one such write at a time."""
        self._writing = in_background(self._strategy.stage(folder), name=f"checkpoint {folder.name}")

    def is_written(self) -> bool:
        """Whether what was staged is on disk. Raises what kept it from getting there."""
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        self._writing.result()
        return True

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _step(self, share: Share, loss: Loss) -> Stats:
        """One optimizer step. The losses of its micro-batches add up; over steps the reported loss is a mean."""
        stats = Stats({"loss": Sum(0.0)})
        rows = share.rows
        parts = [] if share.is_idle else micro_batches(rows, max_tokens=self._pass_tokens)
        num_idle = self._num_idle_passes(len(parts))
        for part in parts:
            stats += self._strategy.forward_backward(part, loss)
        for _ in range(num_idle):
            self._strategy.forward_backward(rows.select_units([shortest(rows.unit_lengths)]), NoLoss(needs=loss.needs))
        # A rank has seen its part of the step only: together they weigh one.
        metrics = dict(stats) | {"loss": Mean(stats["loss"].value, 1 / self._strategy.data_parallel.size)}
        return Stats(metrics) + self._strategy.optim_step()

    def _num_idle_passes(self, num_passes: int) -> int:
        """Ranks gather each other's weights in every pass, so all must make as many as the one with the most. Asked first."""
        return self._strategy.data_parallel.largest(num_passes) - num_passes
