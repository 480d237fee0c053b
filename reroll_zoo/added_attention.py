"""Attention of rows that share prefixes, on a CPU: what asks are the tokens that a row adds, and they look at all of it.

PyTorch has no kernel of variable lengths there, so rows are padded, in groups of about one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reroll.tokens.packing import SharedPrefixes

_MOSTLY = 0.75
"""A row that adds more than this share of its tokens asks whole: the causal kernel needs no mask."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """Sequences of about one length, in whose rows about as many tokens ask; padding repeats the last."""

    asks: Tensor
    """[N, Q] distinct tokens"""
    looks: Tensor
    """[N, L] distinct tokens"""
    bias: Tensor | None
    """[N, 1, Q, L] what is added to scores; None: all of the sequence ask, and look back."""


class AddedAttention:
    """For one forward pass. A sequence that adds most of its tokens asks whole."""

    def __init__(self, shared: SharedPrefixes, cu_seqlens: Tensor) -> None:
        bounds = cu_seqlens.tolist()
        kinds: dict[tuple[bool, int, int], list[tuple[Tensor, int, Tensor]]] = {}
        ends = shared.num_added.cumsum(0).tolist()
        for sequence, added, end in zip(shared.sequences.tolist(), shared.num_added.tolist(), ends, strict=True):
            tokens = shared.index[bounds[sequence] : bounds[sequence + 1]]
            num_asking = len(tokens) if added > _MOSTLY * len(tokens) else added
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
