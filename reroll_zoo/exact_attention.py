"""What `policy.exact` trains with on a GPU: attention of packed tokens by the very kernel by which the engine attends to pages.

Keys and values are laid into pages of their own, each page once however many sequences begin with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reroll.models.attention import Scoring
from reroll_zoo.exact_sums import with_gradient_of
from reroll_zoo.paged_cache.kernels import PAGE, READING_ROWS, attend, tokens_per_block


class PackedPages:
    """Causal attention in which the last tokens of each sequence ask.

    `query_bounds` [N + 1] says which tokens ask, `key_bounds` [N + 1] which places are looked at, and `index` which token
    stands at each place; None: the tokens in their order.
    """

    def __init__(self, query_bounds: Tensor, key_bounds: Tensor, index: Tensor | None) -> None:
        self._device = query_bounds.device
        self._queries, lengths = query_bounds.cpu().diff(), key_bounds.cpu().diff()
        counts = -(-lengths // PAGE)
        firsts = counts.cumsum(0) - counts
        places = torch.arange(int(lengths.sum()))
        tokens = places if index is None else index.cpu()
        shifts = firsts * PAGE - key_bounds.cpu()[:-1]
        flat = torch.zeros(int(counts.sum()) * PAGE, dtype=torch.int64)
        flat[places + shifts.repeat_interleave(lengths)] = tokens
        pages, numbers = torch.unique(flat.view(-1, PAGE), dim=0, return_inverse=True)
        sequence, of_page = torch.arange(len(counts)).repeat_interleave(counts), torch.arange(len(numbers))
        tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        tables[sequence, of_page - firsts.repeat_interleave(counts)] = numbers.to(torch.int32)
        self._sources = pages.flatten().to(self._device)
        self._tables = tables.to(self._device)
        self._starts = (lengths - self._queries).to(torch.int32).to(self._device)
        self._bounds = query_bounds.to(torch.int32)
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, quick: Callable[..., Tensor]) -> Tensor:
        """query [T, H, D], key and value [U, H_kv, D] -> [T, H, D], with the gradient of `quick`."""
        sinks = () if scoring.sinks is None else (scoring.sinks,)

        def with_sinks(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q, k, v, *sinks: way(q, k, v, scoring=replace(scoring, sinks=sinks[0] if sinks else None))

        query, key = query.to(value.dtype), key.to(value.dtype)  # Under autocast, rotary embeddings leave them in fp32.
        return with_gradient_of(with_sinks(quick), with_sinks(self._attend), query, key, value, *sinks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        keys, values = (each.index_select(0, self._sources).view(-1, PAGE, *each.shape[1:]) for each in (key, value))
        block_sequence, block_first = self._cut(tokens_per_block(query.shape[1], key.shape[1], rows=READING_ROWS))
        return attend(
            query,
            keys,
            values,
            tables=self._tables,
            starts=self._starts,
            bounds=self._bounds,
            block_sequence=block_sequence,
            block_first=block_first,
            rows=READING_ROWS,
            scoring=scoring,
        )

    def _cut(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The work of each program, which takes this many neighbouring tokens: its sequence, and its first token there."""
        if num_tokens not in self._blocks:
            counts = -(-self._queries // num_tokens)
            sequence = torch.arange(len(counts)).repeat_interleave(counts)
            first = (torch.arange(len(sequence)) - (counts.cumsum(0) - counts).repeat_interleave(counts)) * num_tokens
            self._blocks[num_tokens] = sequence.to(torch.int32).to(self._device), first.to(torch.int32).to(self._device)
        return self._blocks[num_tokens]
