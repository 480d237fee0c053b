"""The strategy seam: how one model is held, differentiated and updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from reroll.observe.metrics import Stats
from reroll.tokens.batch import Batch
from reroll.tokens.packing import join, join_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A distance between the model's distribution and `batch.teacher_logp`."""

    kind: str
    """A key of DIVERGENCES."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is asked of a model about a batch. Log-probs are cheap; a look at whole distributions costs a pass over the head."""

    logp: bool = True
    entropy: bool = False
    score_norm: bool = False
    top_k: int = 0
    """The likeliest tokens at each place; at least the vocabulary's size: all of them."""
    divergence: Divergence | None = None
    temperature: float | None = None
    """Of the distributions that are looked at whole; None: the batch's, as for `logp`."""
    vocabulary: int | None = None
    """They are taken over so many ids, as if the head had no more: what it shares with that of another model. None: all."""
    value: bool = False
    """The scalar head before every token."""
    score: bool = False
    """The scalar head at the end of every sequence."""
    adapter: bool = True
    """Without its adapter, a model with one is the model it started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The model's answers: [T] each, 0 off the loss mask; None where nobody asked."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    score_norm: Tensor | None = None
    top_ids: Tensor | None = None
    """[T, k]; None too where all tokens were asked for."""
    top_logp: Tensor | None = None
    """[T, k + 1]: theirs, and behind them that of all others together; or [T, vocabulary], every token in its place."""
    divergence: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
    """[N]"""


class LossOutput(NamedTuple):
    """A scalar already divided by the batch's global denominator, and what to report about it."""

    loss: Tensor
    stats: Stats


class Loss(Protocol):
    """What a strategy differentiates: plain data, so that it travels to workers."""

    @property
    def needs(self) -> Needs:
        """What it wants to know of the model."""

    @property
    def compares_with_old_policy(self) -> bool:
        """Whether a second optimizer step on the same rows needs their log-probs from before the first."""

    def prepare(self, batch: Batch) -> Batch:
        """Called once per optimizer step with its whole batch, before the cut into micro-batches."""

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        """The loss of a micro-batch. Those of one optimizer step add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoss:
    """What losses share that see each micro-batch by itself and do not compare with the policy before the update."""

    @property
    def compares_with_old_policy(self) -> bool:
        return False

    def prepare(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLoss(PlainLoss):
    """Asks the model what another loss asks, and learns nothing from it: a pass that is run to keep step with other ranks."""

    needs: Needs

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        answers = (getattr(model, name) for name in Predictions.__dataclass_fields__)
        learnable = [answer for answer in answers if answer is not None and answer.requires_grad]
        return LossOutput(torch.stack([answer.sum() for answer in learnable]).sum() * 0.0, Stats())


def known(value: Tensor | None) -> Tensor:
    """A prediction or a batch field that the caller has asked for, and which is therefore there."""
    if value is None:
        raise ValueError("the batch or the model lacks what this loss needs: compute it first")
    return value


def join_predictions(batch: Batch, parts: Sequence[Sequence[int]], answers: Sequence[Predictions]) -> Predictions:
    """The answers about `batch.select(part)` for each part, put back into the batch's order, on the CPU."""
    joined = {}
    for name in Predictions.__dataclass_fields__:
        values = [value.cpu() for answer in answers if (value := getattr(answer, name)) is not None]
        if values:
            joined[name] = join_sequences(parts, values) if name == "score" else join(batch, parts, values)
    return Predictions(**joined)


class DataParallel:
    """A process's place among those that share out every batch. This one is alone: it waits for nobody."""

    rank: int = 0
    size: int = 1

    def largest(self, count: int) -> int:
        """The largest `count` that any of them came with."""
        return count


class Strategy(ABC):
    """Seven verbs. Epochs, mini-batches and micro-batches are TrainWorker's loop over them, written once.

    Where several processes hold a model together, each calls the same verbs in the same order, as often as the others.
    """

    holds_whole: bool = False
    """Whether the tensors that `weights` gives are the model's own, which change in `optim_step` and move in `to` alone."""
    data_parallel: DataParallel = DataParallel()
    """Who else takes a share of each batch."""

    @abstractmethod
    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        """What the model says about a micro-batch, without gradient."""

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of one micro-batch."""

    @abstractmethod
    def optim_step(self) -> Stats:
        """Clip, step the optimizer and its schedule, zero the gradients. Reports `grad_norm` and `lr`.

        Raises TrainingDiverged, with the weights untouched, if the gradient is not finite.
        """

    @abstractmethod
    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained, by Hugging Face name, by reference where the strategy holds them whole.

        `frozen`: those that never change instead, which is all but the adapter where there is one. Of several processes,
        the first gives all and the others nothing.
        """

    def gathered(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]:
        """The same one by one, each valid until the next is asked for, so that no process need hold them all.

        Every process goes through all of them, and may stop together with the others.
        """
        yield from self.weights(frozen=frozen).items()

    @abstractmethod
    def to(self, device: str, *, weights: bool = True) -> None:
        """Move masters and optimizer state, and the weights that the model computes with, unless told to leave those."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder (of an adapter: a peft folder), plus what `load` goes on from (optimizer, schedule)."""

    def stage(self, folder: Path) -> Callable[[], None]:
        """Copy to the host what `save` would write now; returns what writes it.

        That is called once, on another thread, while the other verbs are used: it must neither read what they change nor
        meet other ranks where they do. A strategy that knows no such copy saves at once, and leaves nothing to write.
        """
        self.save(folder)
        return lambda: None

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
