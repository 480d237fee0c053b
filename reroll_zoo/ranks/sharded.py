"""What strategies have in common whose ranks hold a model in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from reroll.models.heads import SCORE
from reroll.models.load import has_adapter
from reroll.training.base import Strategy
from reroll_zoo.ranks.export import Export, LayerShares

CopyToHost = Callable[[str, Tensor], Tensor]
"""(name, tensor on the device) -> its copy on the host."""


def _copied(name: str, tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


class ShardedStrategy(Strategy):
    """A model that the ranks of the process group hold together."""

    _model: PreTrainedModel
    _make_empty: Callable[[], PreTrainedModel]
    """The model without weights."""

    @abstractmethod
    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]: ...

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self._gathered(frozen=frozen).items() if not name.startswith(f"{SCORE}.")}

    def _export(self, copied: CopyToHost = _copied) -> Export:
        """What this rank writes of the model's folder, or of its adapter's: copies on its host. All ranks take part."""
        is_adapter, model = has_adapter(self._model), self._make_empty()
        shares = LayerShares(1 if is_adapter else dist.get_world_size())
        weights: dict[str, Tensor] = {}
        for name, tensor in self._exported(model, is_adapter=is_adapter):
            if shares.owner_of(name, tensor.nbytes) == dist.get_rank():
                weights[name] = copied(name, tensor)
        if is_adapter:
            model.load_state_dict(weights, strict=False, assign=True)
        return Export(model, weights, None if is_adapter else shares.file_of(dist.get_rank()))

    def _exported(self, empty: PreTrainedModel, *, is_adapter: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self.iter_full_params()
        if not is_adapter:
            yield from self.iter_full_params(frozen=True)
            saved = empty.state_dict().keys()  # Asked of the real one, it would be laid out anew.
            yield from ((name, buffer) for name, buffer in self._model.named_buffers() if name in saved)

    def _gathered(self, *, frozen: bool) -> dict[str, Tensor]:
        """All full parameters, as copies on the host of the first rank; the others take part in the gathers."""
        keeps = dist.get_rank() == 0
        copies = ((name, _copied(name, tensor) if keeps else None) for name, tensor in self.iter_full_params(frozen=frozen))
        return {name: tensor for name, tensor in copies if tensor is not None}
