"""Training on siblings computes their common prompt once: everything but attention runs on distinct tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from reroll.models import exact
from reroll.models.attention import Attention, PackedAttention, Scoring, VarlenAttention, hidden_states
from reroll.models.fused import kernels
from reroll.models.recurrent import is_recurrent
from reroll.models.routing import ReplayedRoutes
from reroll.tokens.batch import Batch
from reroll.tokens.packing import REPEAT_COST
from reroll.tokens.prefixes import SharedPrefixes, shared_prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctTokens:
    """The tokens of a batch that a model must see, and what they look at."""

    ids: Tensor
    """[U]"""
    positions: Tensor
    """[U] place of each in its sequences."""
    attention: Attention
    index: Tensor
    """[T] which of them each token of the batch is."""
    routes: Tensor | None = None
    """[U, layers, top_k] the experts that each is to take; of a shared token those of the sequence that comes first."""


class TokenStates(NamedTuple):
    """What a decoder makes of the tokens of a batch."""

    hidden: Tensor
    """[T, hidden] the last hidden states."""
    routes_differ: Tensor | None
    """[T] where routes are replayed: in what share of the layers the token would have gone to other experts."""

    def at(self, rows: Tensor) -> TokenStates:
        """Those of these tokens."""
        differ = None if self.routes_differ is None else self.routes_differ[rows]
        return TokenStates(self.hidden.index_select(0, rows), differ)


def distinct_tokens(batch: Batch, *, merges: bool = True) -> DistinctTokens:
    """What is left of a batch when every common beginning of its sequences stands there once. Unless it `merges`: all."""
    attention = PackedAttention(batch.cu_seqlens)
    shared = shared_prefixes(batch.ids, batch.cu_seqlens) if merges else None
    if shared is None or len(shared.first) == batch.num_tokens:
        index = torch.arange(batch.num_tokens, device=batch.ids.device)
        return DistinctTokens(ids=batch.ids, positions=batch.positions, attention=attention, index=index, routes=batch.routes)
    first, index = shared.first.to(batch.ids.device), shared.index.to(batch.ids.device)
    return DistinctTokens(
        ids=batch.ids[first],
        positions=batch.positions[first],
        attention=SharedPrefixAttention(attention, shared, batch.cu_seqlens),
        index=index,
        routes=None if batch.routes is None else batch.routes[first],
    )


def token_states(model: PreTrainedModel, batch: Batch) -> TokenStates:
    """What the decoder makes of a batch on its device."""
    distinct = distinct_tokens(batch, merges=not is_recurrent(model))  # A state needs each sequence whole.
    states = routed_states(model, distinct.ids, distinct.positions, distinct.attention, distinct.routes)
    return states if len(states.hidden) == batch.num_tokens else states.at(distinct.index)


def routed_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, attention: Attention, routes: Tensor | None
) -> TokenStates:
    """As `hidden_states`, by way of the experts that `routes` names."""
    replayed = None if routes is None else ReplayedRoutes(model, routes)
    hidden = hidden_states(model, ids, positions, attention, replayed)
    return TokenStates(hidden, None if replayed is None else replayed.differing())


def repeat_cost(device: str, precision: str) -> float:
    """What a token that a micro-batch repeats costs its memory: where only what is added asks, its keys and values."""
    return REPEAT_COST / 2 if device.startswith("cuda") and precision == "bf16" else REPEAT_COST


class SharedPrefixAttention:
    """Attention over whole sequences for a model that runs on distinct tokens.

    Each sequence is put together from the tokens it is made of. Where the last tokens of a sequence can ask alone, those are
    the ones that it adds; elsewhere all ask, and each token's output is taken from the first sequence it stands in.
    Gradients of a shared token sum over its sequences.
    """

    def __init__(self, attention: PackedAttention, shared: SharedPrefixes, cu_seqlens: Tensor) -> None:
        self._attention, self._shared, self._cu_seqlens = attention, shared, cu_seqlens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        if VarlenAttention.takes(value, scoring):
            copies = VarlenAttention.copies_of_each_key(query, key)
            return self._added.attend(layer, query, self._spread(key, copies), self._spread(value, copies), scoring=scoring)
        if query.device.type == "cpu" and scoring.is_plain and not exact.is_exact():
            return self._padded.attend(query, key, value, scaling=scoring.scaling)
        first, index = self._shared.first.to(query.device), self._shared.index.to(query.device)
        whole = [tensor.index_select(0, index) for tensor in (query, key, value)]
        return self._attention.attend(layer, *whole, scoring=scoring).index_select(0, first)

    def _spread(self, states: Tensor, copies: int) -> Tensor:
        """The states of distinct tokens, at every token of every sequence, each head so many times."""
        whole: Tensor = kernels().Spread.apply(states, copies, *self._places)
        return whole

    @cached_property
    def _added(self) -> VarlenAttention:
        """Sequence by sequence, what it adds asks."""
        query_bounds = _bounds(self._shared.num_added)
        key_bounds = _bounds(self._cu_seqlens.diff().cpu()[self._shared.sequences])
        return VarlenAttention(query_bounds.to(self._cu_seqlens.device), key_bounds.to(self._cu_seqlens.device))

    @cached_property
    def _padded(self) -> PaddedAdded:
        return PaddedAdded(self._shared, self._cu_seqlens)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence by sequence, which distinct token stands at each place; and the same the other way round."""
        bounds = self._cu_seqlens.tolist()
        parts = [self._shared.index[bounds[number] : bounds[number + 1]] for number in self._shared.sequences.tolist()]
        index = torch.cat(parts)
        counts = index.bincount(minlength=len(self._shared.first))
        device = self._cu_seqlens.device
        return index.to(device), index.argsort(stable=True).to(device), _bounds(counts).to(device)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Sequences of about one length, in whose rows about as many tokens ask; padding repeats the last."""

    asks: Tensor
    """[N, Q] distinct tokens"""
    looks: Tensor
    """[N, L] distinct tokens"""
    bias: Tensor | None
    """[N, 1, Q, L] what is added to scores; None: all of the sequence ask, and look back."""


class PaddedAdded:
    """On a CPU, what each sequence adds asks, and looks at all of it. A sequence that adds most of its tokens asks whole."""

    def __init__(self, shared: SharedPrefixes, cu_seqlens: Tensor) -> None:
        bounds = cu_seqlens.tolist()
        kinds: dict[tuple[bool, int, int], list[tuple[Tensor, int, Tensor]]] = {}
        ends = shared.num_added.cumsum(0).tolist()
        for sequence, added, end in zip(shared.sequences.tolist(), shared.num_added.tolist(), ends, strict=True):
            tokens = shared.index[bounds[sequence] : bounds[sequence + 1]]
            num_asking = len(tokens) if 4 * added > 3 * len(tokens) else added
            kind = num_asking == len(tokens), num_asking.bit_length(), len(tokens).bit_length()
            if added:
                kinds.setdefault(kind, []).append((tokens, num_asking, torch.arange(end - added, end)))
        self._groups: list[_Asking] = []
        self._places, base = torch.empty(len(shared.first), dtype=torch.int64), 0
        for (is_whole, _, _), rows in kinds.items():
            group = _asking([(tokens, num_asking) for tokens, num_asking, _ in rows], is_whole=is_whole)
            for row, (_, num_asking, new) in enumerate(rows):
                first = base + row * group.asks.shape[1] + num_asking - len(new)
                self._places[new] = torch.arange(first, first + len(new))
            base += group.asks.numel()
            self._groups.append(group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        """[U, H, D], in at least fp32: the kernel's backward pass takes twice that time in bf16."""
        wide, outputs = torch.promote_types(value.dtype, torch.float32), []
        query, key, wide_value = query.to(wide), key.to(wide), value.to(wide)
        for group in self._groups:
            q, k, v = _rows(query, group.asks), _rows(key, group.looks), _rows(wide_value, group.looks)
            bias = None if group.bias is None else group.bias.to(wide)
            output = scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=True
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._places).to(value.dtype)


def _asking(rows: Sequence[tuple[Tensor, int]], *, is_whole: bool) -> _Asking:
    """`rows`: the tokens of each sequence, and how many of its last ones ask."""
    lengths, counts = torch.tensor([len(tokens) for tokens, _ in rows]), torch.tensor([count for _, count in rows])
    steps = torch.arange(int(lengths.max()))
    looks = torch.stack([tokens[steps.clamp(max=len(tokens) - 1)] for tokens, _ in rows])
    if is_whole:
        return _Asking(looks, looks, None)
    back = counts[:, None] - 1 - torch.arange(int(counts.max()))
    places = lengths[:, None] - 1 - back.clamp(min=0)  # [N, Q]
    hidden = steps > places[:, None, :, None]
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return _Asking(looks.gather(1, places), looks, bias)


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """[U, H, D] -> [N, H, L, D]"""
    return states.index_select(0, index.flatten()).view(*index.shape, *states.shape[1:]).transpose(1, 2)


def _bounds(lengths: Tensor) -> Tensor:
    """[N + 1] where parts of these lengths [N] begin and end."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
