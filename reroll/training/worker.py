"""The worker that holds a model and its strategy, and the loop of optimizer steps and micro-batches, written once."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import ModelConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError
from reroll.models.heads import SCORE, keep_padding_apart, score_head
from reroll.models.load import DTYPES, Head, load_model, load_tokenizer, stored_dtype
from reroll.observe.manifest import Sums, sums_of
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo
from reroll.runtime.watchdog import at_work, beat
from reroll.tokens.batch import Batch
from reroll.tokens.packing import fill, micro_batches
from reroll.training.base import Loss, Needs, Predictions, Strategy, ZeroLoss, join_predictions
from reroll.training.offload import in_background
from reroll.training.parallel.build import skeleton
from reroll.training.parallel.ranks import join_process_group, leaving_on_error, only_first
from reroll.training.torch_strategy import TorchStrategy
from reroll.weights.buckets import Bucket, Channel, ProcessLocation, location_of
from reroll.weights.sender import WeightSender


@dataclass(frozen=True, slots=True)
class PredictJob:
    """A batch to run the model on, and which outputs are wanted."""

    batch: Batch
    needs: Needs


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One data-parallel rank's rows of one optimizer step; the denominators are those of the whole step."""

    rows: Batch
    is_idle: bool = False
    """There are fewer rows than ranks: this rank repeats a row of another one, with no weight, to take part in collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One update, as one data-parallel rank sees it."""

    steps: tuple[RankBatch, ...]
    """One for each optimizer step."""
    loss: Loss


class PartShape(NamedTuple):
    """What a worker's part of a weight looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FollowJob:
    """A worker's part of some weights to move towards, and by what share of the way."""

    parts: Mapping[str, Tensor]
    share: float


class TrainWorker:
    """Holds one model, or this rank's part of it: to train for `total_steps` optimizer steps, or, with 0, only to predict.

    `rendezvous` is the address at which the ranks of a strategy form their process group.
    """

    def __init__(
        self,
        info: WorkerInfo,
        config: ModelConfig,
        *,
        total_steps: int,
        head: Head = "language",
        rendezvous: str | None = None,
    ) -> None:
        self._device, self._rank = info.device, info.rank
        self._pass_tokens = config.strategy.pass_tokens
        self._strategy = make_strategy(info, config, total_steps=total_steps, head=head, rendezvous=rendezvous)
        self._stays = self._strategy.holds_whole and config.swap != "all"
        """Whether its weights never move in memory."""
        self._writing: Future[Sums] | None = None
        self._sender: WeightSender | None = None
        self._gathering: Generator[tuple[str, Tensor]] | None = None
        self._buckets: Iterator[Bucket | None] = iter(())

    @at_work()
    def predict(self, job: PredictJob) -> Predictions:
        """The model's outputs for a batch, on the CPU. Data-parallel ranks may be given different batches."""
        batch = job.batch
        parts = fill(batch.lengths, max_tokens=self._pass_tokens)
        num_idle = self._num_idle_passes(len(parts))
        answers = []
        for part in parts:
            beat()
            answers.append(self._strategy.forward(batch.select(part), job.needs))
        for _ in range(num_idle):
            beat()
            self._strategy.forward(batch.select([shortest(batch.lengths)]), job.needs)
        return join_predictions(batch, parts, answers)

    @at_work()
    def train(self, job: TrainJob) -> Stats:
        """This rank's part of an update. Every rank is given as many steps, and takes them together with the others.

        Where a batch has no `old_logp`, the policy has not moved yet when it meets a token: the training pass itself gives it.
        """
        return sum((self._step(batch, job.loss) for batch in job.steps), Stats())

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained (or those that are frozen) by Hugging Face name, by reference."""
        return self._strategy.weights(frozen=frozen)

    def part_shapes(self) -> dict[str, PartShape]:
        """What this worker holds of every weight."""
        return {name: PartShape(tuple(part.shape), part.dtype) for name, part in self._strategy.parts().items()}

    def parts(self, wanted: Mapping[str, PartShape]) -> dict[str, Tensor]:
        """This worker's part of these weights, of this dtype and on the host: by reference where that is how it is held."""
        held = self._strategy.parts()
        return {name: held[name].to("cpu", like.dtype) for name, like in wanted.items()}

    def follow(self, job: FollowJob) -> None:
        """Move this worker's part of these weights towards that of a model that is held in the same way."""
        self._strategy.follow(job.parts, share=job.share)

    def location(self) -> ProcessLocation:
        """The host and device of this process."""
        return location_of(self._device)

    def open_sender(self, channel: Channel) -> None:
        """From now on weights are sent through this channel."""
        if self._sender is not None:
            self._sender.close()
        self._sender = WeightSender(channel, rank=self._rank, device=self._device)

    @at_work()
    def begin_push(self, *, version: int, base_version: int | None) -> Bucket | None:
        """The first bucket of this version; see `WeightSender.buckets` and `next_bucket`."""
        if self._sender is None:
            raise ValueError("there is no channel to send weights through: call open_sender first")
        if self._gathering is not None:
            self._gathering.close()  # Of a push that broke off.
        self._gathering = self._strategy.iter_full_params()
        # An engine generates: it knows nothing of a critic's head.
        tensors = ((name, tensor) for name, tensor in self._gathering if not name.startswith(f"{SCORE}."))
        self._buckets = self._sender.buckets(tensors, version=version, base_version=base_version, lasting=self._stays)
        return self.next_bucket()

    @at_work()
    def next_bucket(self) -> Bucket | None:
        """Gather the next bucket with the other ranks, and send it if this rank is a sender. None after the last one."""
        return next(self._buckets, None)

    def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move optimizer state, and weights unless told not to, to `cpu` while another role uses the device; None: back."""
        self._strategy.to(device or self._device, weights=weights)
        if device == "cpu" and self._device.startswith("cuda"):
            torch.cuda.empty_cache()  # Other processes cannot use what this one only keeps for later.

    def save(self, folder: Path) -> Sums:
        """Write a Hugging Face folder and the optimizer's state. Returns the sums of the files that this rank has written."""
        return sums_of(folder, self._strategy.save(folder))

    def stage(self, folder: Path) -> None:
        """Copy what `save` would write now, and write it while other calls are served: one such write at a time."""
        write = self._strategy.stage(folder)
        self._writing = in_background(lambda: sums_of(folder, write()), name=f"checkpoint {folder.name}")

    def written(self) -> Sums | None:
        """What `save` would return, once what was staged is on disk; None until then. Raises what kept it from that."""
        if self._writing is None:
            return {}
        return self._writing.result() if self._writing.done() else None

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _step(self, batch: RankBatch, loss: Loss) -> Stats:
        """One optimizer step. The losses of its micro-batches add up; over steps the reported losses are means."""
        stats = Stats({"loss": Sum(0.0)})
        rows = batch.rows
        parts = [] if batch.is_idle else micro_batches(rows, max_tokens=self._pass_tokens)
        num_idle = self._num_idle_passes(len(parts))
        for part in parts:
            beat()
            stats += self._strategy.forward_backward(part, loss)
        for _ in range(num_idle):
            beat()
            self._strategy.forward_backward(rows.select_units([shortest(rows.unit_lengths)]), ZeroLoss(needs=loss.needs))
        # A rank has seen its part of the step only: together they weigh one.
        weight = 1 / self._strategy.data_parallel.size
        metrics = {name: Mean(metric.value, weight) if isinstance(metric, Sum) else metric for name, metric in stats.items()}
        return Stats(metrics) + self._strategy.optim_step()

    def _num_idle_passes(self, num_passes: int) -> int:
        """Ranks gather each other's weights in every pass, so all must make as many as the one with the most. Asked first."""
        return self._strategy.data_parallel.largest(num_passes) - num_passes


def shortest(lengths: Sequence[int]) -> int:
    """The index of the shortest: the cheapest one to run where any would do."""
    return min(range(len(lengths)), key=lengths.__getitem__)


def make_strategy(
    info: WorkerInfo, config: ModelConfig, *, total_steps: int, head: Head = "language", rendezvous: str | None = None
) -> Strategy:
    """A strategy for `total_steps` optimizer steps; one for 0 only answers, and holds nothing but weights.

    `rendezvous` is the address where the ranks of a strategy of several find each other.
    """
    strategy, tokenizer = config.strategy, load_tokenizer(config.model)
    read = partial(_read, config, tokenizer, is_fixed=total_steps == 0, head=head)
    if isinstance(strategy, TorchStrategyConfig):
        model = read(device=info.device)
        return TorchStrategy(model, tokenizer, strategy, config.optim, total_steps=total_steps, head=head)
    join_process_group(rendezvous, rank=info.rank, world_size=info.world_size, device=info.device)
    with leaving_on_error():
        make_empty = partial(skeleton, config, tokenizer, head=head)

        def read_first(*, as_stored: bool = False) -> PreTrainedModel | None:
            return only_first(partial(read, device="cpu", as_stored=as_stored))

        made: Strategy = strategy.implementation()(
            make_empty, read_first, tokenizer, strategy, config.optim, device=info.device, total_steps=total_steps
        )
        return made


def _read(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str,
    is_fixed: bool,
    head: Head,
    as_stored: bool = False,
) -> PreTrainedModel:
    """The model in the strategy's precision, or, where it is to be copied tensor by tensor, as it lies on disk."""
    dtype = (stored_dtype(config.model) if as_stored else None) or DTYPES[config.strategy.precision]
    model = load_model(config.model, dtype=dtype, device=device, head=head, lora=config.lora)
    if head == "score":
        keep_padding_apart(model, tokenizer)
        if is_fixed and not score_head(model).weight.any():
            raise ModelError(f"{config.model} has no scalar head: name a reward model, e.g. one of pipeline reward_model")
    if is_fixed:
        model.requires_grad_(False)  # Then it has no master weights either.
    return model
