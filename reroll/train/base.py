"""The strategy seam: how one model is held, differentiated and updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from reroll.observe.metrics import Stats
from reroll.tokens.batch import Batch


class LossOutput(NamedTuple):
    """A scalar already divided by the batch's global denominator, and what to report about it."""

    loss: Tensor
    stats: Stats


Loss = Callable[[Batch, Tensor], LossOutput]
"""(micro-batch, logp [T] with gradient) -> LossOutput. Logp is 0 off the loss mask."""


class Strategy(ABC):
    """Seven verbs. Epochs, mini-batches and micro-batches are TrainWorker's loop over them, written once."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """[T] fp32 log-probs of a micro-batch, without gradient; 0 off the loss mask."""

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of one micro-batch."""

    @abstractmethod
    def optim_step(self) -> Stats:
        """Clip, step the optimizer and its schedule, zero the gradients. Reports `grad_norm` and `lr`.

        Raises TrainingDiverged, with the weights untouched, if the gradient is not finite.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by Hugging Face name, by reference where the strategy holds them whole."""

    @abstractmethod
    def to(self, device: str) -> None:
        """Move weights and optimizer state."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder plus `trainer.pt` (optimizer, schedule)."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
