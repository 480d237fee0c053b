"""The strategy interface: how one model is held, differentiated and updated."""

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
    """Of the group `reroll.divergences`."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which outputs of a model are wanted for a batch. Log-probs are cheap; full distributions cost a pass over the LM head."""

    logp: bool = True
    entropy: bool = False
    score_norm: bool = False
    top_k: int = 0
    """The k likeliest tokens at each position; the vocabulary's size or more: all of them."""
    divergence: Divergence | None = None
    temperature: float | None = None
    """Temperature of the full distributions; None: the batch's, as for `logp`."""
    vocabulary: int | None = None
    """Full distributions are taken over the first so many ids, which another model's vocabulary shares. None: over all."""
    value: bool = False
    """The scalar head before every token."""
    score: bool = False
    """The scalar head at the end of every sequence."""
    adapter: bool = True
    """Without its adapter, a model with one is the model it started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The model's outputs: [T] each, 0 off the loss mask; None where `Needs` did not ask."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    score_norm: Tensor | None = None
    top_ids: Tensor | None = None
    """[T, k]; None too where all tokens were asked for."""
    top_logp: Tensor | None = None
    """[T, k + 1]: their log-probs, and last that of all other tokens together; or [T, vocabulary]."""
    divergence: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
    """[N]"""
    routes_differ: Tensor | None = None
    """Where the batch has routes: in what share of the layers the token before would have gone to other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """What weighs tokens in a loss."""

    kind: str
    """Of the group `reroll.corrections`, or `reroll.rejections`."""
    options: Mapping[str, Any] = field(default_factory=dict)


class TokenWeights(NamedTuple):
    """What a token's loss is multiplied by, [T], without gradient, and what to report about it."""

    weight: Tensor
    stats: Stats


class LossOutput(NamedTuple):
    """A scalar already divided by the batch's global denominator, and what to report about it."""

    loss: Tensor
    stats: Stats


class Loss(Protocol):
    """What a strategy differentiates: plain data, so that it travels to workers."""

    @property
    def needs(self) -> Needs:
        """The model outputs that the loss is computed from."""

    @property
    def compares_with_old_policy(self) -> bool:
        """Whether a second optimizer step on the same rows needs their log-probs from before the first."""

    def prepare(self, batch: Batch) -> Batch:
        """Called once per optimizer step with its whole batch, before the cut into micro-batches."""

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        """The loss of a micro-batch. Those of one optimizer step add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Base of losses that need nothing but the micro-batch: no preparation of the whole step, no old policy."""

    @property
    def compares_with_old_policy(self) -> bool:
        return False

    def prepare(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLoss(MicroBatchLoss):
    """Zero, with the model outputs of another loss: a pass that a rank makes only to take part in the others' collectives."""

    needs: Needs

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        answers = (getattr(model, name) for name in Predictions.__dataclass_fields__)
        learnable = [answer for answer in answers if answer is not None and answer.requires_grad]
        return LossOutput(torch.stack([answer.sum() for answer in learnable]).sum() * 0.0, Stats())


def required(value: Tensor | None) -> Tensor:
    """A model output or batch field that must be there. Raises ValueError if it is None."""
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
    """A process's rank among the data-parallel ones. This base class is a process alone."""

    rank: int = 0
    size: int = 1

    def largest(self, count: int) -> int:
        """The largest `count` over all ranks: a collective."""
        return count


class Strategy(ABC):
    """A model that can be run, trained, moved and saved. Epochs, mini-batches and micro-batches are TrainWorker's loop.

    Where several processes hold a model together, each calls the same methods in the same order, as often as the others.
    """

    holds_whole: bool = False
    """Whether the tensors that `weights` gives are the model's own, which change in `optim_step` and move in `to` alone."""
    merges_prefixes: bool = True
    """Whether it computes once what rows of a micro-batch begin with alike: layers that carry a state keep them apart."""
    data_parallel: DataParallel = DataParallel()
    """The ranks that each get a part of every batch."""

    @abstractmethod
    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        """The model's outputs for a micro-batch, without gradient."""

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

    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]:
        """As `weights`, one full tensor at a time, each valid until the next, so that no process need hold them all.

        Every process goes through all of them, and may stop together with the others.
        """
        yield from self.weights(frozen=frozen).items()

    def parts(self) -> Mapping[str, Tensor]:
        """This process's part of every parameter, by reference. No other process takes part."""
        raise NotImplementedError(f"{type(self).__name__} does not hold its parameters in parts that can be copied")

    def slices(self) -> Mapping[str, Slice] | None:
        """Where `parts` of what is trained lie in the whole weights, the same from step to step; None if they can only be
        gathered. Every process names the same weights, in the same order."""
        return None

    def follow(self, parts: Mapping[str, Tensor], *, share: float) -> None:
        """Move these parameters by this share of the way to `parts`, of a model that is held in the same way. Of one that is
        not trained: nothing else moves it. The sum is taken in fp32 and rounded once; a share of 1 is a plain copy.
        """
        mine = self.parts()
        with torch.no_grad():
            for name, there in parts.items():
                part, goal = mine[name], there.to(mine[name].device)
                part.copy_(goal if share == 1 else torch.lerp(part.float(), goal.float(), share))

    @abstractmethod
    def to(self, device: str, *, weights: bool = True) -> None:
        """Move masters and optimizer state, and the weights that the model computes with, unless told to leave those."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Write a Hugging Face folder (of an adapter: a peft folder), plus what `load` goes on from (optimizer, schedule).

        Returns the files that this process has written, which are on disk.
        """

    def stage(self, folder: Path) -> Callable[[], list[Path]]:
        """Copy to the host what `save` would write now; returns what writes it, and returns what `save` does.

        That is called once, on another thread, while the other methods are used: it must neither read what they change nor
        use their process groups. A strategy that knows no such copy saves at once, and leaves nothing to write.
        """
        files = self.save(folder)
        return lambda: files

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises RunFolderError if that is damaged, or not of this model and strategy."""
