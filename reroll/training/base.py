"""The interface of a training strategy, and of the losses that it differentiates."""

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
from reroll.weights.slices import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A distance between the model's distribution and `batch.target_logp`."""

    kind: str
    """A kind of the group `reroll.divergences`."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The model outputs to compute for a batch. Log-probs are cheap; full distributions cost a pass over the LM head."""

    logp: bool = True
    entropy: bool = False
    score_norm: bool = False
    top_k: int = 0
    """The k most likely tokens at each position; the size of the vocabulary or more: all of them."""
    divergence: Divergence | None = None
    temperature: float | None = None
    """Temperature of the full distributions; None: the batch's, as for `logp`."""
    vocabulary: int | None = None
    """Full distributions cover this many leading ids, those shared with another model. None: all."""
    value: bool = False
    """The output of the scalar head before every token."""
    score: bool = False
    """The output of the scalar head at the end of every sequence."""
    adapter: bool = True
    """False: leave the adapter out, which gives the model that the adapter was added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The model's outputs, [T] each, 0 off the loss mask; None if `Needs` did not ask for it."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    score_norm: Tensor | None = None
    top_ids: Tensor | None = None
    """[T, k]; also None if all tokens were asked for."""
    top_logp: Tensor | None = None
    """[T, k + 1]: their log-probs, and last the log-prob of all other tokens together; or [T, vocabulary]."""
    divergence: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
    """[N]"""
    routes_differ: Tensor | None = None
    """For a batch with routes: the fraction of layers in which the previous token would have gone to other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """A function that weights tokens in a loss."""

    kind: str
    """A kind of the group `reroll.corrections` or `reroll.rejections`."""
    options: Mapping[str, Any] = field(default_factory=dict)


class TokenWeights(NamedTuple):
    """The factors of the tokens' losses, [T], without gradient, and metrics about them."""

    weight: Tensor
    stats: Stats


class LossOutput(NamedTuple):
    """A scalar, divided by the batch's global denominator already, and metrics about it."""

    loss: Tensor
    stats: Stats


class Loss(Protocol):
    """A function that a strategy differentiates. It is plain data, so that it can be sent to workers."""

    @property
    def needs(self) -> Needs:
        """The model outputs that it is computed from."""

    @property
    def compares_with_old_policy(self) -> bool:
        """Whether a second optimizer step on the same rows needs their log-probs from before the first."""

    def prepare(self, batch: Batch) -> Batch:
        """Called once per optimizer step with its whole batch, before the split into micro-batches."""

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        """The loss of a micro-batch. The losses of one optimizer step add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Base of losses that need only the micro-batch: no preparation of the whole step, no old policy."""

    @property
    def compares_with_old_policy(self) -> bool:
        return False

    def prepare(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLoss(MicroBatchLoss):
    """Zero, with the model outputs of another loss: for passes that a rank makes only to take part in collectives."""

    needs: Needs

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        answers = (getattr(model, name) for name in Predictions.__dataclass_fields__)
        learnable = [answer for answer in answers if answer is not None and answer.requires_grad]
        return LossOutput(torch.stack([answer.sum() for answer in learnable]).sum() * 0.0, Stats())


def required(value: Tensor | None) -> Tensor:
    """A model output or batch field that must be present. Raises ValueError if it is None."""
    if value is None:
        raise ValueError("the batch or the model lacks what this loss needs: compute it first")
    return value


def join_predictions(batch: Batch, parts: Sequence[Sequence[int]], answers: Sequence[Predictions]) -> Predictions:
    """Join the predictions for `batch.select(part)` of each part in the batch's order, on the CPU."""
    joined = {}
    for name in Predictions.__dataclass_fields__:
        values = [value.cpu() for answer in answers if (value := getattr(answer, name)) is not None]
        if values:
            joined[name] = join_sequences(parts, values) if name == "score" else join(batch, parts, values)
    return Predictions(**joined)


class DataParallel:
    """A process's data-parallel rank. This base class stands for a single process."""

    rank: int = 0
    size: int = 1

    def largest(self, count: int) -> int:
        """The largest `count` over all ranks: a collective."""
        return count


class Strategy(ABC):
    """A model that can be run, trained, moved and saved. `TrainWorker` loops over epochs, mini-batches and micro-batches.

    Processes that hold a model together call the same methods in the same order, equally often.
    """

    holds_whole: bool = False
    """Whether `weights` gives the model's own tensors, which only `optim_step` changes and only `to` moves."""
    merges_prefixes: bool = True
    """Whether it computes common prefixes of a micro-batch's rows once; layers that carry a state cannot."""
    data_parallel: DataParallel = DataParallel()
    """Its place among the ranks that split every batch."""

    @abstractmethod
    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        """The model's outputs for a micro-batch, without gradients."""

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of one micro-batch."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradient that has been added so far."""
        raise NotImplementedError(f"{type(self).__name__} cannot scale what it has summed: set train.stream to false")

    @abstractmethod
    def optim_step(self) -> Stats:
        """Clip, step the optimizer and its schedule, zero the gradients. Reports `grad_norm` and `lr`.

        Raises TrainingDiverged, with the weights untouched, if the gradient is not finite.
        """

    @abstractmethod
    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The trained parameters by Hugging Face name, by reference if the strategy holds them whole.

        `frozen`: instead those that never change, which is all but the adapter if there is one. Of several processes, the
        first returns all and the others nothing.
        """

    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]:
        """As `weights`, one full tensor at a time, each valid until the next, so that no process has to hold all.

        All processes must iterate together, and stop together if they stop early.
        """
        yield from self.weights(frozen=frozen).items()

    def parts(self) -> Mapping[str, Tensor]:
        """This process's part of every parameter, by reference. No other process takes part."""
        raise NotImplementedError(f"{type(self).__name__} does not hold its parameters in parts that can be copied")

    def slices(self) -> Mapping[str, Slice] | None:
        """The slices of the whole weights that `parts` of the trained parameters cover, the same in every step; None if weights
        must be gathered. All processes name the same weights in the same order."""
        return None

    def follow(self, parts: Mapping[str, Tensor], *, share: float) -> None:
        """Move these parameters a fraction `share` of the way towards `parts`, those of a model with the same layout.

        For models that are not trained otherwise. The sum is computed in fp32 and rounded once; a share of 1 copies.
        """
        mine = self.parts()
        with torch.no_grad():
            for name, there in parts.items():
                part, goal = mine[name], there.to(mine[name].device)
                part.copy_(goal if share == 1 else torch.lerp(part.float(), goal.float(), share))

    @abstractmethod
    def to(self, device: str, *, weights: bool = True) -> None:
        """Move master weights and optimizer state, and with `weights` also the weights that the model computes with."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Write a Hugging Face folder (for an adapter: a peft folder), and the state for `load` (optimizer, schedule).

        Returns the files that this process wrote; they are on disk.
        """

    def stage(self, folder: Path) -> Callable[[], list[Path]]:
        """Copy to the host what `save` would write now. Returns a function that writes it, with the result of `save`.

        The function is called once, on another thread, while other methods run: it must neither read what they change nor use
        their process groups. By default everything is saved at once, and the function has nothing to do.
        """
        files = self.save(folder)
        return lambda: files

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises RunFolderError if it is damaged, or belongs to another model or strategy."""
