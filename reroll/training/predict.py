"""The model's outputs for a batch: one pass through the decoder, then the heads that are needed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reroll.algo.divergence import coarse
from reroll.config.divergence import DivergenceConfig
from reroll.config.formula import find_function
from reroll.models.heads import entropy, map_logprobs, score_norm, sequence_scores, token_values
from reroll.models.logprobs import token_logprobs
from reroll.tokens.batch import Batch
from reroll.training.base import Divergence, Needs, Predictions, required
from reroll.training.shared_prefix import TokenStates, token_states


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
