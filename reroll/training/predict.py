"""The model's outputs for a batch: one pass through the decoder, then the heads that are needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from reroll.algo.divergence import coarse
from reroll.config.divergence import DivergenceConfig
from reroll.config.formula import find_function
from reroll.config.registry import load_entry
from reroll.models import exact, fused
from reroll.models.attention import Attention, PackedAttention, Scoring, VarlenAttention, hidden_states
from reroll.models.heads import entropy, map_logprobs, score_norm, sequence_scores, token_values
from reroll.models.logprobs import token_logprobs
from reroll.models.recurrent import is_recurrent
from reroll.models.routing import ReplayedRoutes
from reroll.models.sight import Sight, eye_of
from reroll.tokens.batch import Batch
from reroll.tokens.packing import REPEAT_COST, SharedPrefixes, shared_prefixes
from reroll.training.base import Divergence, Needs, Predictions, required


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
    first: Tensor
    """[U] where in the batch each stands first."""
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
        return DistinctTokens(
            ids=batch.ids, positions=batch.positions, attention=attention, index=index, first=index, routes=batch.routes
        )
    first, index = shared.first.to(batch.ids.device), shared.index.to(batch.ids.device)
    return DistinctTokens(
        ids=batch.ids[first],
        positions=batch.positions[first],
        attention=SharedPrefixAttention(attention, shared, batch.cu_seqlens),
        index=index,
        first=first,
        routes=None if batch.routes is None else batch.routes[first],
    )


def token_states(model: PreTrainedModel, batch: Batch) -> TokenStates:
    """What the decoder makes of a batch on its device."""
    distinct = distinct_tokens(batch, merges=not is_recurrent(model))  # A state needs each sequence whole.
    eye = eye_of(model)
    sight = eye.look_packed(batch.ids, batch.cu_seqlens) if eye else None
    is_whole = len(distinct.ids) == batch.num_tokens
    if sight is not None and not is_whole:
        sight = sight.at(distinct.first, distinct.index)
    states = routed_states(model, distinct.ids, distinct.positions, distinct.attention, distinct.routes, sight)
    return states if is_whole else states.at(distinct.index)


def routed_states(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    attention: Attention,
    routes: Tensor | None,
    sight: Sight | None = None,
) -> TokenStates:
    """As `hidden_states`, by way of the experts that `routes` names."""
    replayed = None if routes is None else ReplayedRoutes(model, routes)
    hidden = hidden_states(model, ids, positions, attention, replayed, sight)
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
        if exact.is_exact() and fused.runs_kernels(value):
            return self._exact.attend(query, key, value, scoring, partial(self.attend, layer))  # type: ignore[no-any-return]
        if VarlenAttention.takes(value, scoring):
            copies = VarlenAttention.copies_of_each_key(query, key)
            return self._added.attend(layer, query, self._spread(key, copies), self._spread(value, copies), scoring=scoring)
        if query.device.type == "cpu" and scoring.is_plain and not exact.is_exact() and self._on_cpu is not None:
            return self._on_cpu.attend(query, key, value, scaling=scoring.scaling)  # type: ignore[no-any-return]
        first, index = self._shared.first.to(query.device), self._shared.index.to(query.device)
        whole = [tensor.index_select(0, index) for tensor in (query, key, value)]
        return self._attention.attend(layer, *whole, scoring=scoring).index_select(0, first)

    def _spread(self, states: Tensor, copies: int) -> Tensor:
        """The states of distinct tokens, at every token of every sequence, each head so many times."""
        whole: Tensor = fused.kernels().Spread.apply(states, copies, *self._places)
        return whole

    @cached_property
    def _added(self) -> VarlenAttention:
        return VarlenAttention(*self._bounds_of_added)

    @cached_property
    def _exact(self) -> Any:
        return exact.arithmetic().packed_attention(*self._bounds_of_added, self._places[0])

    @cached_property
    def _bounds_of_added(self) -> tuple[Tensor, Tensor]:
        """Sequence by sequence, what it adds asks."""
        lengths = self._cu_seqlens.diff().cpu()[self._shared.sequences]
        query_bounds, key_bounds = (_bounds(each).to(self._cu_seqlens.device) for each in (self._shared.num_added, lengths))
        return query_bounds, key_bounds

    @cached_property
    def _on_cpu(self) -> Any:
        """The entry point `added` of the group `reroll.kernels`, if there is one: what asks on a CPU are added tokens alone."""
        attention = load_entry("reroll.kernels", "added")
        return None if attention is None else attention(self._shared, self._cu_seqlens)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence by sequence, which distinct token stands at each place; and the same the other way round."""
        bounds, places = self._cu_seqlens.tolist(), self._shared.index.numpy()
        index = np.concatenate([places[bounds[number] : bounds[number + 1]] for number in self._shared.sequences.tolist()])
        order = np.argsort(index, kind="stable")  # Quick where much is in order already.
        counts = _bounds(torch.from_numpy(np.bincount(index, minlength=len(self._shared.first))))
        device = self._cu_seqlens.device
        return torch.from_numpy(index).to(device), torch.from_numpy(order).to(device), counts.to(device)


def _bounds(lengths: Tensor) -> Tensor:
    """[N + 1] where parts of these lengths [N] begin and end."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def predict(model: PreTrainedModel, batch: Batch, needs: Needs, *, chunk: int) -> Predictions:
    """The outputs for a batch on the model's device; with gradient unless torch has it switched off."""
    return Predictions(**apply_heads(model, token_states(model, batch), batch, needs, chunk=chunk))


def apply_heads(model: PreTrainedModel, states: TokenStates, batch: Batch, needs: Needs, *, chunk: int) -> dict[str, Tensor]:
    """Apply the heads to what the decoder made of a batch: the fields of `Predictions` that are needed."""
    hidden, positions = states.hidden, batch.loss_mask.nonzero().squeeze(1)
    answers = _from_full_distributions(model, hidden, positions, batch, needs, chunk=chunk)
    if needs.logp:
        answers["logp"] = token_logprobs(model, hidden, batch.ids, positions, temperature=batch.temperature, chunk=chunk)
    if needs.value:
        answers["value"] = token_values(model, hidden, positions)
    if needs.score:
        answers["score"] = sequence_scores(model, hidden, batch.cu_seqlens[1:] - 1)
    if states.routes_differ is not None:
        differ = torch.zeros_like(states.routes_differ)
        answers["routes_differ"] = differ.index_copy(0, positions, states.routes_differ[positions - 1])
    return answers


def _from_full_distributions(
    model: PreTrainedModel, hidden: Tensor, positions: Tensor, batch: Batch, needs: Needs, *, chunk: int
) -> dict[str, Tensor]:
    """The outputs that need the full distribution at each position: one product with the LM head for all."""
    if not (needs.entropy or needs.score_norm or needs.top_k or needs.divergence):
        return {}

    def look(logp: Tensor, rows: Tensor) -> dict[str, Tensor]:
        tokens, answers = positions[rows], {}
        if needs.entropy:
            answers["entropy"] = entropy(logp)
        if needs.score_norm:
            answers["score_norm"] = score_norm(logp, batch.ids[tokens])
        if needs.top_k:
            answers |= _top(logp, needs.top_k)
        if needs.divergence:
            answers["divergence"] = _divergence(logp, batch, tokens, needs.divergence)
        return answers

    temperature = batch.temperature if needs.temperature is None else needs.temperature
    return map_logprobs(model, hidden, positions, look, temperature=temperature, chunk=chunk, vocabulary=needs.vocabulary)


def _top(logp: Tensor, k: int) -> dict[str, Tensor]:
    if k >= logp.shape[1]:
        return {"top_logp": logp}
    ids = logp.topk(k).indices
    return {"top_ids": ids, "top_logp": coarse(logp, ids)}


def _divergence(logp: Tensor, batch: Batch, tokens: Tensor, divergence: Divergence) -> Tensor:
    ids = None if batch.target_ids is None else batch.target_ids[tokens]
    distance = find_function(DivergenceConfig.group, divergence.kind)
    return distance(coarse(logp, ids), required(batch.target_logp)[tokens], **divergence.options)  # type: ignore[no-any-return]
