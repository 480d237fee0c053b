"""The KV cache in dense slots: decoding works on contiguous views, which suits a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from reroll.infer.embedded.attention import StepAttention
from reroll.infer.embedded.backend import CacheBackend, PendingTokens, sampled_places
from reroll.infer.embedded.cache import SlotCache
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.sampler import RowSampling, sample
from reroll.models.exact import exact_forward


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of a step that is over."""

    tokens: list[int]
    logprobs: list[float]

    def result(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


class SlotBackend(CacheBackend[Tensor]):
    """One dense tensor of slots. A saved prefix is a copy. `max_bytes` bounds the slots in use; None: the host does."""

    def __init__(self, runner: ModelRunner, *, max_bytes: int | None = None) -> None:
        self._runner, self._max_bytes = runner, max_bytes
        self._cache = SlotCache(
            num_layers=runner.num_layers,
            num_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            dtype=runner.dtype,
            device=runner.device,
        )

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    def surely_has_room(self, *, num_slots: int, num_new: int, num_newcomers: int = 0) -> bool:
        return self._max_bytes is None

    def has_room(self, ends: Sequence[int], newcomers: Sequence[tuple[int, int]] = ()) -> bool:
        every = [*ends, *(end for end, _ in newcomers)]
        return self._max_bytes is None or len(every) * max(every) * self.bytes_per_token <= self._max_bytes

    def forward_and_sample(
        self,
        starts: Sequence[int],
        uncached: Sequence[Sequence[int]],
        *,
        leaders: Sequence[int],
        rows: Sequence[RowSampling],
        num_drafted: Sequence[int] = (),
    ) -> PendingTokens:
        lengths = [len(tokens) for tokens in uncached]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._cache.reserve(num_slots=len(rows), length=max(ends))
        attention = StepAttention(self._cache, starts=starts, lengths=lengths)
        device = self._runner.device
        ids = torch.tensor([token for tokens in uncached for token in tokens], device=device)
        hidden = self._runner.hidden(ids, attention.positions, attention)
        slots, places = sampled_places(lengths, leaders, num_drafted)
        firsts = [0, *accumulate(lengths)]
        sources = [firsts[slot] + place for slot, place in zip(slots, places, strict=True)]
        num_read = len(slots) - len(leaders)
        if num_read < len(hidden):
            hidden = hidden[torch.tensor(sources[:num_read], device=device)]
        logits = self._runner.logits(hidden)
        if leaders:
            logits = logits[torch.tensor([*range(num_read), *leaders], device=device)]
        drawn_at = [starts[slot] + place + 1 for slot, place in zip(slots, places, strict=True)]
        with exact_forward(self._runner.model):
            return KnownTokens(*sample(logits, rows, drawn_at))

    def copy(self, source: int, target: int, *, length: int) -> None:
        self._cache.reserve(num_slots=target + 1, length=length)
        self._cache.copy(source, target, length=length)

    def save_prefix(self, slot: int, *, length: int) -> Tensor:
        return self._cache.save_prefix(slot, length=length)

    def restore_prefix(self, slot: int, saved: Tensor, *, length: int) -> None:
        self._cache.reserve(num_slots=slot + 1, length=length)
        self._cache.restore_prefix(slot, saved, length=length)

    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        if slot != last:
            self._cache.copy(last, slot, length=length)

    def free(self) -> None:
        self._cache.free()
