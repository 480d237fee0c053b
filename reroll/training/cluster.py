"""The training workers of one model: `TrainCluster` in the controller, `TrainWorker` in each worker.

The cluster splits a batch into each rank's share of every optimizer step. A worker processes its share in micro-batches with
the methods of its strategy. This loop is the same for all strategies.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reroll.config.parts import ModelConfig
from reroll.config.registry import load_entry
from reroll.errors import ModelError, TrainingDiverged, WorkerDied, WorkerError
from reroll.models.heads import SCORE
from reroll.models.load import Head
from reroll.observe.manifest import Sums, sums_of
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo, Workers
from reroll.runtime.watchdog import at_work, beat
from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance, fill, micro_batches, mini_batches, order_of, prefix_order
from reroll.training.base import Loss, Needs, Predictions, ZeroLoss, join_predictions, required
from reroll.training.make import make_strategy
from reroll.training.offload import in_background
from reroll.training.predict import repeat_cost
from reroll.weights.buckets import Bucket, Channel, ProcessLocation, location_of
from reroll.weights.sender import WeightSender
from reroll.weights.slices import Slice

T = TypeVar("T")
J = TypeVar("J")
P = ParamSpec("P")

GRACE_S = 15.0
"""When a rank has failed, the others may wait for it forever: after this time they are ended."""
MAX_PAUSE_S = 1.0
"""The longest pause between two polls for a written checkpoint."""
BUCKET_BYTES = 2**30
"""When a reference follows the policy, its weights pass through this process in buckets of about this size."""


@dataclass(frozen=True, slots=True)
class PredictJob:
    """A batch to run the model on, and the outputs to return."""

    batch: Batch
    needs: Needs


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One data-parallel rank's rows of one optimizer step; the denominators are those of the whole step."""

    rows: Batch
    is_idle: bool = False
    """With fewer rows than ranks, this rank repeats another's row with zero weight, to take part in the collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One data-parallel rank's part of an update."""

    steps: tuple[RankBatch, ...]
    """One for each optimizer step."""
    loss: Loss


class PartShape(NamedTuple):
    """Shape and dtype of a worker's part of a weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FollowJob:
    """A worker's part of the target weights, and the fraction of the way to move towards them."""

    parts: Mapping[str, Tensor]
    share: float


class Rendezvous:
    """The TCP store in the controller through which a model's ranks form their process group. Keep it as long as they live."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class TrainCluster:
    """A policy, reference, critic or teacher, wherever its workers run.

    Each `ranks_per_share` consecutive workers get the same data. `rendezvous` is the store of their process group.
    """

    def __init__(
        self, workers: Workers[TrainWorker], *, ranks_per_share: int = 1, rendezvous: Rendezvous | None = None
    ) -> None:
        self._workers, self._ranks_per_share, self._rendezvous = workers, ranks_per_share, rendezvous
        self.num_updates = 0
        """How often `train` or `follow` has changed the weights, or may have."""

    async def broadcast(self, method: Callable[Concatenate[TrainWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method on every worker, all of which must take part. Returns the results in rank order."""
        return await self._together(self._workers.broadcast(method, *args, **kwargs))

    async def scatter(self, method: Callable[[TrainWorker, J], T], shards: Sequence[J]) -> list[T]:
        """Call a method on every worker, each with its own shard. Returns the results in rank order."""
        return await self._together(self._workers.scatter(method, shards))

    @property
    def num_shares(self) -> int:
        """How many parts a batch is split into."""
        return self._workers.size // self._ranks_per_share

    async def predict(self, batch: Batch, needs: Needs) -> Predictions:
        """The model's outputs for the batch. The workers share it, balanced by distinct tokens."""
        dp_size = self.num_shares
        parts = balance(prefix_order(batch.ids, batch.cu_seqlens), num_parts=min(dp_size, len(batch)))
        jobs = [PredictJob(batch.select(part), needs) for part in parts]
        # With more workers than sequences, the rest get a copy: all must take part in the collectives.
        jobs += [PredictJob(batch.select([0]), needs)] * (dp_size - len(parts))
        answers = await self.scatter(TrainWorker.predict, self._for_all(jobs))
        return join_predictions(batch, parts, answers[:: self._ranks_per_share][: len(parts)])

    async def logprobs(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """[T] fp32 log-probs of the batch's tokens; 0 off the loss mask."""
        return required((await self.predict(batch, Needs(adapter=adapter))).logp)

    async def values(self, batch: Batch) -> Tensor:
        """[T] the scalar head's value before each token of the loss mask."""
        return required((await self.predict(batch, Needs(logp=False, value=True))).value)

    async def train(self, batch: Batch, loss: Loss, *, epochs: int = 1, mini_batches: int = 1, seed: int = 0) -> Stats:
        """Train on the batch `epochs` times, with `mini_batches` optimizer steps each; `train_jobs` splits it.

        With a single step the training pass itself gives the old log-probs, as the policy has not moved yet. With several
        steps they are computed first, unless the batch has them.
        """
        started_s = time.perf_counter()
        if epochs * mini_batches > 1 and batch.old_logp is None and loss.compares_with_old_policy:
            batch = batch.replace(old_logp=await self.logprobs(batch))
        jobs = train_jobs(batch, loss, epochs=epochs, steps_per_epoch=mini_batches, seed=seed, dp_size=self.num_shares)
        self.num_updates += 1
        try:
            answers = await self.scatter(TrainWorker.train, self._for_all(jobs))
        except TrainingDiverged:
            if epochs * mini_batches == 1:
                self.num_updates -= 1  # The only step was not taken.
            raise
        seconds = time.perf_counter() - started_s
        stats = sum(answers[:: self._ranks_per_share], Stats()) + _throughput(batch, epochs=epochs, seconds=seconds)
        return stats.prefixed("train/") + Stats({"time/train_s": Last(seconds)})

    async def accumulate(self, batch: Batch, loss: Loss, *, denominator: int) -> Stats:
        """Add the gradient of a part of an optimizer step, divided by this; `apply` corrects it and takes the step."""
        started_s = time.perf_counter()
        rows = batch.replace(num_loss_tokens=denominator, num_sequences=denominator)
        jobs = [TrainJob(steps=(share,), loss=loss) for share in _split(rows, self.num_shares)]
        await self.scatter(TrainWorker.accumulate, self._for_all(jobs))
        return _throughput(batch, epochs=1, seconds=time.perf_counter() - started_s).prefixed("train/")

    async def apply(self, *, scale: float) -> Stats:
        """Take the optimizer step by `scale` times the gradient that `accumulate` added up."""
        answers = await self.broadcast(TrainWorker.apply, scale)
        self.num_updates += 1
        return sum(answers[:: self._ranks_per_share], Stats()).prefixed("train/")

    async def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The trained parameters, or the frozen ones, by Hugging Face name.

        By reference if the worker lives in this process, else a copy.
        """
        return (await self.broadcast(TrainWorker.weights, frozen=frozen))[0]

    async def follow(self, other: TrainCluster, *, share: float) -> None:
        """Move every weight a fraction `share` of the way towards `other`'s, a model with the same number of ranks and layout.

        Each worker updates its own parts; the targets pass through this process bucket by bucket, and no worker waits for
        another. Raises ModelError before anything is changed, if the shapes differ.
        """
        shapes = await self.shapes_shared_with(other)
        self.num_updates += 1
        for names in _buckets(shapes):
            wanted = [{name: held[name] for name in names} for held in shapes]
            # One call per cluster: if a worker fails, the workers of its own cluster are ended.
            parts = await other.scatter(TrainWorker.parts, wanted)
            await self.scatter(TrainWorker.follow, [FollowJob(part, share) for part in parts])

    async def shapes_shared_with(self, other: TrainCluster) -> list[dict[str, PartShape]]:
        """The shapes of each worker's parts. Raises ModelError unless `other`'s workers hold parts of the same shapes."""
        mine = await self.broadcast(TrainWorker.part_shapes)
        theirs = await other.broadcast(TrainWorker.part_shapes)
        for here, there in zip(mine, theirs, strict=True):
            differing = [name for name, part in here.items() if name not in there or there[name].shape != part.shape]
            if differing:
                raise ModelError(
                    f"a reference of another shape cannot follow the policy: {differing[0]} differs (name a model of the "
                    "policy's architecture in reference.model, or set reference.sync_every to 0)"
                )
        return mine

    async def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move the workers' optimizer state, and with `weights` their weights, to a device; None: back to their own."""
        await self.broadcast(TrainWorker.to, device, weights=weights)

    async def save(self, folder: Path) -> Sums:
        """Write a checkpoint that `load` continues from and that transformers opens. Returns the checksums of its files."""
        return _merged(await self.broadcast(TrainWorker.save, folder))

    async def stage(self, folder: Path) -> None:
        """Copy the checkpoint that `save` would write now. It is written in the background; `written` waits for it."""
        await self.broadcast(TrainWorker.stage, folder)

    async def written(self) -> Sums:
        """Wait until the staged checkpoint is on disk; returns the checksums of its files. Raises the error that prevented it,
        once no rank writes any more.

        It polls the workers between other calls: a call that waited inside a worker would keep it from training.
        """
        pause_s, failed_s = 0.01, float("inf")
        while True:
            answers = await asyncio.gather(*self._workers.broadcast(TrainWorker.written), return_exceptions=True)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if errors:
                failed_s = min(failed_s, time.perf_counter())
            if None not in answers or time.perf_counter() > failed_s + GRACE_S:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if errors:
            raise min(errors, key=_distance_from_cause)
        return _merged(sums for sums in answers if isinstance(sums, dict))

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        await self.broadcast(TrainWorker.load, folder)

    async def close(self) -> None:
        """Stop the workers."""
        await self._workers.stop()

    def _for_all(self, jobs: Iterable[J]) -> list[J]:
        """The job of each worker: consecutive workers that share rows get the same one."""
        return [job for job in jobs for _ in range(self._ranks_per_share)]

    async def _together(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of a call that every worker takes part in.

        If one fails, the others may wait for it forever. They get `GRACE_S` to fail too and are then ended. The error raised
        is the one closest to the cause.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=GRACE_S)
            errors = [error for task in tasks if task.done() and (error := task.exception())]
            if pending:
                await self._workers.stop()
                await asyncio.gather(*pending, return_exceptions=True)  # Their errors only say that they were ended.
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        if errors:
            raise min(errors, key=_distance_from_cause)
        return [task.result() for task in tasks]


class TrainWorker:
    """Holds one model, or this rank's part of it, to train it for `total_steps` optimizer steps; 0: to predict only.

    `rendezvous` is the address of the store through which the ranks form their process group.
    """

    def __init__(
        self, info: WorkerInfo, config: ModelConfig, *, total_steps: int, head: Head = "language", rendezvous: str | None = None
    ) -> None:
        self._device, self._rank = info.device, info.rank
        self._pass_tokens = config.strategy.pass_tokens
        self._replays_routes = config.replays_routes
        self._strategy = make_strategy(info, config, total_steps=total_steps, head=head, rendezvous=rendezvous)
        merges = self._strategy.merges_prefixes
        self._repeat_cost = repeat_cost(info.device, config.strategy.precision) if merges else 1.0
        self._stays = self._strategy.holds_whole and config.swap != "all"
        """Whether its weights keep their addresses."""
        self._accumulated = Stats({"loss": Sum(0.0)})
        self._end_profile: Callable[[], None] | None = None
        self._writing: Future[Sums] | None = None
        self._sender: WeightSender | None = None
        self._sends_slices = False
        self._gathering: Generator[tuple[str, Tensor]] | None = None
        self._buckets: Iterator[Bucket | None] = iter(())

    @at_work()
    def predict(self, job: PredictJob) -> Predictions:
        """The model's outputs for a batch, on the CPU. Data-parallel ranks may be given different batches."""
        batch = self._routed(job.batch)
        parts = fill(prefix_order(batch.ids, batch.cu_seqlens), max_tokens=self._pass_tokens, repeat_cost=self._repeat_cost)
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
        """This rank's part of an update. All ranks have the same number of steps, and take each together.

        A batch without `old_logp` is trained on before the policy has moved: the training pass itself gives the log-probs.
        """
        return sum((self._take_step(self._add_gradients(batch, job.loss)) for batch in job.steps), Stats())

    @at_work()
    def accumulate(self, job: TrainJob) -> None:
        """Add the gradient of this rank's part of a part of an optimizer step."""
        for batch in job.steps:
            self._accumulated += self._add_gradients(batch, job.loss)

    @at_work()
    def apply(self, scale: float) -> Stats:
        """Take the optimizer step by `scale` times what was accumulated."""
        stats, self._accumulated = self._accumulated, Stats({"loss": Sum(0.0)})
        self._strategy.scale_gradients(scale)
        return self._take_step(stats, scale)

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The trained parameters (or the frozen ones) by Hugging Face name, by reference."""
        return self._strategy.weights(frozen=frozen)

    def part_shapes(self) -> dict[str, PartShape]:
        """The shape of this worker's part of every weight."""
        return {name: PartShape(tuple(part.shape), part.dtype) for name, part in self._strategy.parts().items()}

    def parts(self, wanted: Mapping[str, PartShape]) -> dict[str, Tensor]:
        """This worker's part of these weights, on the host and in these dtypes; by reference if it is held so already."""
        held = self._strategy.parts()
        return {name: held[name].to("cpu", like.dtype) for name, like in wanted.items()}

    def follow(self, job: FollowJob) -> None:
        """Move this worker's part of these weights towards the given one."""
        self._strategy.follow(job.parts, share=job.share)

    def location(self) -> ProcessLocation:
        """The host and device of this process."""
        return location_of(self._device)

    def slices(self) -> dict[str, Slice] | None:
        """The slice that this worker holds of each pushed weight; None if weights have to be gathered."""
        slices = self._strategy.slices()
        return None if slices is None else {name: part for name, part in slices.items() if not _is_score(name)}

    def open_sender(self, channel: Channel) -> None:
        """Send weights through this channel from now on."""
        self._sends_slices = channel.slices is not None
        if self._sender is not None:
            self._sender.close()
        self._sender = WeightSender(channel, rank=self._rank, device=self._device)

    @at_work()
    def begin_push(self, *, version: int, base_version: int | None) -> Bucket | None:
        """Start a push; returns its first bucket. See `WeightSender.buckets` and `next_bucket`."""
        if self._sender is None:
            raise ValueError("there is no channel to send weights through: call open_sender first")
        if self._gathering is not None:
            self._gathering.close()  # It belongs to a push that broke off.
        if self._sends_slices:
            self._buckets = self._sender.pieces(self._strategy.parts(), version=version, base_version=base_version)
            return self.next_bucket()
        self._gathering = self._strategy.iter_full_params()
        tensors = ((name, tensor) for name, tensor in self._gathering if not _is_score(name))
        self._buckets = self._sender.buckets(tensors, version=version, base_version=base_version, lasting=self._stays)
        return self.next_bucket()

    @at_work()
    def next_bucket(self) -> Bucket | None:
        """Fill the next bucket, together with the other ranks if weights are gathered, and send it if this rank is a sender.
        None after the last one."""
        return next(self._buckets, None)

    def profile(self, folder: Path | None) -> None:
        """Record what this worker does from now on; None: write that down, in the folder that was given."""
        if self._end_profile is not None:
            self._end_profile()
        record = load_entry("reroll.profilers", "torch") if folder else None
        self._end_profile = record(folder / f"rank-{self._rank}.json.gz") if folder and record else None

    def to(self, device: str | None, *, weights: bool = True) -> None:
        """Move the optimizer state, and with `weights` the weights, to `cpu` while another role uses the device; None: back."""
        self._strategy.to(device or self._device, weights=weights)
        if device == "cpu" and self._device.startswith("cuda"):
            torch.cuda.empty_cache()  # Other processes cannot use memory that this one caches.

    def save(self, folder: Path) -> Sums:
        """Write a Hugging Face folder and the optimizer's state. Returns the checksums of the files that this rank wrote."""
        return sums_of(folder, self._strategy.save(folder))

    def stage(self, folder: Path) -> None:
        """Copy what `save` would write now, and write it in the background; one such write at a time."""
        write = self._strategy.stage(folder)
        self._writing = in_background(lambda: sums_of(folder, write()), name=f"checkpoint {folder.name}")

    def written(self) -> Sums | None:
        """The checksums of the staged checkpoint, once it is on disk; None until then. Raises the error of a failed write."""
        if self._writing is None:
            return {}
        return self._writing.result() if self._writing.done() else None

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _add_gradients(self, batch: RankBatch, loss: Loss) -> Stats:
        """Add the gradient of this rank's rows. The losses of micro-batches add up."""
        stats = Stats({"loss": Sum(0.0)})
        rows = self._routed(batch.rows)
        parts = [] if batch.is_idle else micro_batches(rows, max_tokens=self._pass_tokens, repeat_cost=self._repeat_cost)
        num_idle = self._num_idle_passes(len(parts))
        for part in parts:
            beat()
            stats += self._strategy.forward_backward(part, loss)
        for _ in range(num_idle):
            beat()
            self._strategy.forward_backward(rows.select_units([shortest(rows.unit_lengths)]), ZeroLoss(needs=loss.needs))
        return stats

    def _take_step(self, stats: Stats, scale: float = 1.0) -> Stats:
        """One optimizer step, and what is reported of it: the loss as the mean over steps."""
        # A rank has seen its part of the step only: the weights of all ranks add up to 1.
        weight = 1 / self._strategy.data_parallel.size
        losses = {name: Mean(metric.value * scale, weight) for name, metric in stats.items() if isinstance(metric, Sum)}
        return Stats({**stats, **losses}) + self._strategy.optim_step()

    def _routed(self, batch: Batch) -> Batch:
        """The batch, without expert routes unless this model replays them."""
        return batch if self._replays_routes else batch.replace(routes=None)

    def _num_idle_passes(self, num_passes: int) -> int:
        """Passes without data: ranks gather each other's weights in every pass, so all make as many as the one with most."""
        return self._strategy.data_parallel.largest(num_passes) - num_passes


def train_jobs(
    batch: Batch, loss: Loss, *, epochs: int = 1, steps_per_epoch: int = 1, seed: int = 0, dp_size: int = 1
) -> list[TrainJob]:
    """Split an update into the jobs of `dp_size` data-parallel ranks, balanced by distinct tokens in every step.

    `steps_per_epoch` is at most the number of units in the batch. Each epoch is cut into steps differently; `seed` decides
    how. `Loss.prepare` sees each whole step here, before the split over ranks. Only the first step keeps the weight versions
    of its tokens: in later steps the policy has moved away from all of them.
    """
    steps = [
        loss.prepare(step)
        for epoch in range(epochs)
        for step in mini_batches(batch, steps_per_epoch, seed=seed * epochs + epoch)
    ]
    split = [_split(step, dp_size) for step in [*steps[:1], *(step.replace(version=None) for step in steps[1:])]]
    return [TrainJob(steps=batches, loss=loss) for batches in zip(*split, strict=True)]


def _split(step: Batch, dp_size: int) -> list[RankBatch]:
    parts = balance(order_of(step), num_parts=min(dp_size, len(step.unit_lengths)))
    batches = [RankBatch(step.select_units(part)) for part in parts]
    idle = RankBatch(step.select_units([shortest(step.unit_lengths)]), is_idle=True)
    return batches + [idle] * (dp_size - len(batches))


def _buckets(shapes: Sequence[Mapping[str, PartShape]]) -> Iterator[list[str]]:
    """All names, in runs whose parts of all workers fit into a bucket; a larger weight has one of its own."""
    names: list[str] = []
    num_bytes = 0
    for name in shapes[0]:
        more = sum(held[name].num_bytes for held in shapes)
        if names and num_bytes + more > BUCKET_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += more
    yield names


def _is_score(name: str) -> bool:
    """Whether it is the critic's head on the policy's trunk, which engines do not have."""
    return name.startswith(f"{SCORE}.")


def _merged(parts: Iterable[Sums]) -> Sums:
    return {name: found for part in parts for name, found in part.items()}


def _distance_from_cause(error: BaseException) -> int:
    """Sort key: a lost process, or an error of ours in one rank, makes the other ranks fail with network errors."""
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


def shortest(lengths: Sequence[int]) -> int:
    """The index of the shortest sequence, the cheapest to run where any will do."""
    return min(range(len(lengths)), key=lengths.__getitem__)
