"""What strategies have in common whose ranks hold a model in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from reroll.models.heads import SCORE
from reroll.models.load import has_adapter
from reroll.training.base import Strategy

CopyToHost = Callable[[str, Tensor], Tensor]
"""(name, tensor on the device) -> its copy on the host."""


def _copied(name: str, tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


class ShardedStrategy(Strategy):
    """A model that the ranks of the process group hold together: what they gather is kept by the first one, on its host."""

    _model: PreTrainedModel
    _make_empty: Callable[[], PreTrainedModel]
    """The model without weights."""

    @abstractmethod
    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]: ...

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self._gathered(frozen=frozen).items() if not name.startswith(f"{SCORE}.")}

    def _whole_on_host(self, copied: CopyToHost = _copied) -> PreTrainedModel | None:
        """The model as it is exported, or of one with an adapter, that: on the first rank. All ranks take part."""
        weights = self._gathered(copied, frozen=False)
        if not has_adapter(self._model):
            weights |= self._gathered(copied, frozen=True)
        if dist.get_rank() > 0:
            return None
        model = self._make_empty()
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        return model

    def _gathered(self, copied: CopyToHost = _copied, *, frozen: bool) -> dict[str, Tensor]:
        """All full parameters, as copies on the host of the first rank; the others take part in the gathers."""
        keeps = dist.get_rank() == 0
        copies = ((name, copied(name, tensor) if keeps else None) for name, tensor in self.iter_full_params(frozen=frozen))
        return {name: tensor for name, tensor in copies if tensor is not None}
