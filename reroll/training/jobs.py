"""How the controller splits an update: into optimizer steps, then each step's rows over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance, mini_batches
from reroll.training.base import Loss


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


def train_jobs(
    batch: Batch, loss: Loss, *, epochs: int = 1, steps_per_epoch: int = 1, seed: int = 0, dp_size: int = 1
) -> list[TrainJob]:
    """The jobs of `dp_size` data-parallel ranks, balanced by tokens in every step. Together they are the whole update.

    `steps_per_epoch` is at most the number of units in the batch. The cut into steps differs from epoch to epoch; `seed`
    decides it. A loss looks at each whole step here, before any rank sees a part of it.
    """
    steps = [
        loss.prepare(step)
        for epoch in range(epochs)
        for step in mini_batches(batch, steps_per_epoch, seed=seed * epochs + epoch)
    ]
    split = [_split(step, dp_size) for step in steps]
    return [TrainJob(steps=batches, loss=loss) for batches in zip(*split, strict=True)]


def _split(step: Batch, dp_size: int) -> list[RankBatch]:
    parts = balance(step.unit_lengths, num_parts=min(dp_size, len(step.unit_lengths)))
    batches = [RankBatch(step.select_units(part)) for part in parts]
    idle = RankBatch(step.select_units([shortest(step.unit_lengths)]), is_idle=True)
    return batches + [idle] * (dp_size - len(batches))


def shortest(lengths: Sequence[int]) -> int:
    """The index of the shortest: the cheapest one to run where any would do."""
    return min(range(len(lengths)), key=lengths.__getitem__)
