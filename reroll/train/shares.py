"""How an update is dealt out: optimizer steps first, then each step's rows over the ranks. Done once, in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reroll.tokens.batch import Batch
from reroll.tokens.packing import balance, mini_batches
from reroll.train.base import Loss


@dataclass(frozen=True, slots=True)
class Share:
    """What one data-parallel rank gets of one optimizer step; the denominators are those of the whole step."""

    rows: Batch
    is_idle: bool = False
    """There are fewer rows than ranks: this rank keeps step with the others over a row of theirs, which then has no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One update, as one data-parallel rank sees it."""

    steps: tuple[Share, ...]
    """One for each optimizer step."""
    loss: Loss


def train_jobs(
    batch: Batch, loss: Loss, *, epochs: int = 1, steps_per_epoch: int = 1, seed: int = 0, num_shares: int = 1
) -> list[TrainJob]:
    """The jobs of `num_shares` ranks, balanced by tokens in every step. Together they are the whole update.

    `steps_per_epoch` is at most the number of units in the batch. The cut into steps differs from epoch to epoch; `seed`
    decides it. A loss looks at each whole step here, before any rank sees a part of it.
    """
    steps = [
        loss.prepare(step)
        for epoch in range(epochs)
        for step in mini_batches(batch, steps_per_epoch, seed=seed * epochs + epoch)
    ]
    dealt = [_deal(step, num_shares) for step in steps]
    return [TrainJob(steps=shares, loss=loss) for shares in zip(*dealt, strict=True)]


def _deal(step: Batch, num_shares: int) -> list[Share]:
    parts = balance(step.unit_lengths, num_parts=min(num_shares, len(step.unit_lengths)))
    shares = [Share(step.select_units(part)) for part in parts]
    idle = Share(step.select_units([shortest(step.unit_lengths)]), is_idle=True)
    return shares + [idle] * (num_shares - len(shares))


def shortest(lengths: Sequence[int]) -> int:
    """Which one to pass through a model where any would do."""
    return min(range(len(lengths)), key=lengths.__getitem__)
