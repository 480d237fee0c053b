"""Sequence parallelism after DeepSpeed-Ulysses: `sp` neighbouring ranks share the tokens of every sequence.

Each rank takes its stretch of a pack through embedding, norms, MLPs and heads, none of which looks at another token. For
attention, which does, the ranks swap: each gives up its stretch for all heads and gets all tokens for its share of the heads,
and back. What the heads say about single tokens is put together at the end, so that a loss sees whole predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import PreTrainedModel

from reroll.errors import ModelError
from reroll.models.attention import Attention, Scoring
from reroll.models.recurrent import is_recurrent
from reroll.models.routing import unknown
from reroll.tokens.batch import Batch
from reroll.training.predict import TokenStates, distinct_tokens, routed_states


def check_shares(model: PreTrainedModel, *, sp: int, tp: int) -> None:
    """Raise ModelError if `sp` ranks cannot share the attention heads of this model, of which `tp` splits each have a part."""
    if is_recurrent(model):
        raise ModelError(
            f"layers of family {model.config.model_type!r} carry a state along the sequence, which ranks cannot share: "
            "set strategy.sp to 1"
        )
    num_heads = model.config.get_text_config().num_attention_heads // tp
    if num_heads % sp:
        of_each = f"{num_heads} attention heads" + (f" (of each of {tp} splits)" if tp > 1 else "")
        raise ModelError(f"{of_each} cannot be shared by {sp} ranks: set strategy.sp to a divisor of {num_heads}")


class SequenceShare:
    """This rank's part of a micro-batch: a stretch of its distinct tokens, as long as that of every other rank of the group.

    The states of this stretch predict some tokens of the micro-batch and end some of its sequences. `batch` holds those
    tokens alone, in the form that heads are asked about: its first sequence are the tokens to predict behind one that is
    only there to stand first, and then every end is a sequence of its own.
    """

    def __init__(self, batch: Batch, group: dist.ProcessGroup) -> None:
        self._distinct, self._group = distinct_tokens(batch), group
        self._num_tokens, self._num_sequences = batch.num_tokens, len(batch)
        self._width = -(-len(self._distinct.ids) // group.size())
        self._start = group.rank() * self._width
        index = self._distinct.index - self._start
        is_mine = (index >= 0) & (index < self._width)

        positions, ends = batch.loss_mask.nonzero().squeeze(1), batch.cu_seqlens[1:] - 1
        self._predicted = positions[is_mine[positions - 1]]
        self._ended = is_mine[ends].nonzero().squeeze(1)
        first, last = positions.new_zeros(1), ends[self._ended]
        # The state at a position predicts the next token; the last predicted token has no state behind it.
        self._rows = torch.cat([index[self._predicted - 1], first, index[last]])
        lengths = [len(self._predicted) + 1, *[1] * len(last)]
        chosen = batch.rearrange(torch.cat([first, self._predicted, last]), lengths)
        places = torch.arange(chosen.num_tokens, device=first.device)
        self.batch = chosen.replace(loss_mask=(places >= 1) & (places < lengths[0]))

    def states(self, model: PreTrainedModel) -> TokenStates:
        """What the decoder makes of the tokens of `batch`. Every rank of the group calls it."""
        distinct, num_distinct = self._distinct, len(self._distinct.ids)
        padding = (0, self._group.size() * self._width - num_distinct)
        mine = slice(self._start, self._start + self._width)
        ids, positions = (pad(whole, padding)[mine] for whole in (distinct.ids, distinct.positions))
        attention = SequenceParallelAttention(distinct.attention, self._group, num_tokens=num_distinct)
        routes = distinct.routes
        if routes is not None:
            routes = pad(routes, (0, 0, 0, 0, *padding), value=unknown(routes.dtype))[mine]
        return routed_states(model, ids, positions, attention, routes).at(self._rows)

    def whole(self, answers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The answers about all of the micro-batch, from every rank's about its `batch`: the fields of Predictions."""
        return {name: self._whole(answer, is_score=name == "score") for name, answer in answers.items()}

    def _whole(self, answer: Tensor, *, is_score: bool) -> Tensor:
        places, length = (self._ended, self._num_sequences) if is_score else (self._predicted, self._num_tokens)
        mine = answer.new_zeros(length, *answer.shape[1:]).index_put((places,), answer[1 : 1 + len(places)])
        total: Tensor = _SumOverRanks.apply(mine, self._group)  # type: ignore[no-untyped-call]
        return total


class SequenceParallelAttention:
    """Attention for a model that runs on this rank's stretch of `num_tokens` tokens: it computes its heads for all of them.

    Stretches are equally long; the last tokens of the group's last ones may be padding, which nobody looks at.
    Key-value heads that are too few to share are repeated, so that each rank has those that its query heads read.
    """

    def __init__(self, attention: Attention, group: dist.ProcessGroup, *, num_tokens: int) -> None:
        self._attention, self._group, self._num_tokens = attention, group, num_tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        sp, width = self._group.size(), len(query)
        repeats = math.lcm(key.shape[1], sp) // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        whole = (query.to(value.dtype), key.to(value.dtype), value)  # Under autocast, rotary embeddings leave two in fp32.
        by_rank = torch.cat([tensor.reshape(width, sp, -1) for tensor in whole], -1).transpose(0, 1)
        by_token = self._exchange(by_rank).flatten(0, 1)[: self._num_tokens]
        parts = torch.split(by_token, [tensor[0].numel() // sp for tensor in whole], -1)
        mine = [part.view(self._num_tokens, -1, tensor.shape[2]) for part, tensor in zip(parts, whole, strict=True)]
        if scoring.sinks is not None:  # Those of this rank's heads.
            scoring = replace(scoring, sinks=scoring.sinks.view(sp, -1)[self._group.rank()])
        output = self._attention.attend(layer, *mine, scoring=scoring)
        padded = pad(output.flatten(1), (0, 0, 0, sp * width - self._num_tokens))
        by_head = self._exchange(padded.view(sp, width, -1)).transpose(0, 1)
        return by_head.reshape(width, query.shape[1], -1)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """[sp, …]: entry r goes to rank r of the group, and what rank r sent takes its place."""
        received: Tensor = _AllToAll.apply(by_rank, self._group)  # type: ignore[no-untyped-call]
        return received


class _AllToAll(torch.autograd.Function):
    """[sp, …] -> [sp, …]. What comes back of a tensor is the gradient of what was sent."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swap(by_rank, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swap(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group. Each rank takes the gradient of the same loss of it, so its own part's gradient is that one."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _swap(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
