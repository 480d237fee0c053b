"""Training on siblings computes their common prompt once: everything but attention runs on distinct tokens only."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from reroll.models.attention import PackedAttention, Scoring, hidden_states
from reroll.tokens.batch import Batch
from reroll.tokens.prefixes import SharedPrefixes, shared_prefixes


def batch_hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The decoder's last hidden states [T, hidden] of a batch on the model's device."""
    shared = shared_prefixes(batch.ids, batch.cu_seqlens)
    attention = PackedAttention(batch.cu_seqlens)
    if len(shared.first) == batch.num_tokens:
        return hidden_states(model, batch.ids, batch.positions, attention)
    first, index = shared.first.to(batch.ids.device), shared.index.to(batch.ids.device)
    distinct = SharedPrefixAttention(attention, SharedPrefixes(first=first, index=index))
    return hidden_states(model, batch.ids[first], batch.positions[first], distinct).index_select(0, index)


class SharedPrefixAttention:
    """Attention over whole sequences for a model that runs on distinct tokens.

    Each sequence is put together from the tokens it is made of, attends as usual, and each token's output is taken from
    the first sequence it stands in. Gradients of a shared token sum over its sequences.
    """

    def __init__(self, attention: PackedAttention, shared: SharedPrefixes) -> None:
        self._attention, self._shared = attention, shared

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        whole = [tensor.index_select(0, self._shared.index) for tensor in (query, key, value)]
        return self._attention.attend(layer, *whole, scoring=scoring).index_select(0, self._shared.first)
