"""The KV cache in dense slots: decoding works on contiguous views, which suits a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.infer.embedded.attention import SlotCache, StepAttention
from reroll.infer.embedded.backend import CacheBackend, PendingTokens, sampled_places
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.sampler import RowSampling, sample
from reroll.infer.embedded.slot_routes import SlotRoutes
from reroll.models.exact import exact_forward
from reroll.models.sight import Sight


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of a step that is over."""

    tokens: list[int]
    logprobs: list[float]

    def result(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """Copies of what a slot held."""

    keys_and_values: Tensor
    states: tuple[Tensor, ...] = ()
    routes: Tensor | None = None


class SlotBackend(CacheBackend[SavedSlot]):
    """One dense tensor of slots. A saved prefix is a copy. `max_bytes` bounds the slots in use; None: the host does."""

    def __init__(self, runner: ModelRunner, *, max_bytes: int | None = None) -> None:
        self._runner, self._max_bytes = runner, max_bytes
        self._cache = SlotCache(
            num_layers=len(runner.attention_layers),
            num_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            dtype=runner.dtype,
            device=runner.device,
        )
        self._routes = SlotRoutes(runner.routes, runner.device) if runner.routes else None

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token + (self._runner.routes.num_bytes if self._runner.routes else 0)

    def surely_has_room(self, *, num_slots: int, num_new: int, num_newcomers: int = 0) -> bool:
        return self._max_bytes is None

    def has_room(self, ends: Sequence[int], newcomers: Sequence[tuple[int, int]] = ()) -> bool:
        every = [*ends, *(end for end, _ in newcomers)]
        num_bytes = len(every) * (max(every) * self.bytes_per_token + self.bytes_per_state)
        return self._max_bytes is None or num_bytes <= self._max_bytes

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
        self._reserve(num_slots=len(rows), length=max(ends))
        attention = self._attention(starts, lengths)
        device = self._runner.device
        ids = torch.tensor([token for tokens in uncached for token in tokens], device=device)
        noted = self._runner.noted_routes()
        hidden = self._runner.hidden(ids, attention.positions, attention, noted, self._sight(starts, uncached))
        if self._routes is not None and noted is not None:
            self._routes.store(noted.taken(), attention.positions, lengths=lengths)
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

    def _attention(self, starts: Sequence[int], lengths: Sequence[int]) -> StepAttention:
        return StepAttention(self._cache, starts=starts, lengths=lengths)

    def _sight(self, starts: Sequence[int], uncached: Sequence[Sequence[int]]) -> Sight | None:
        """What is to be seen among the new tokens of the slots."""
        return None

    def routes(self, slot: int, start: int, end: int) -> NDArray[Any] | None:
        return None if self._routes is None else self._routes.of(slot, start, end)

    def copy(self, source: int, target: int, *, length: int) -> None:
        self._reserve(num_slots=target + 1, length=length)
        self._move(source, target, length=length)

    def save_prefix(self, slot: int, *, length: int) -> SavedSlot:
        routes = None if self._routes is None else self._routes.save(slot, length=length)
        return SavedSlot(self._cache.save_prefix(slot, length=length), routes=routes)

    def restore_prefix(self, slot: int, saved: SavedSlot, *, length: int) -> None:
        self._reserve(num_slots=slot + 1, length=length)
        self._cache.restore_prefix(slot, saved.keys_and_values, length=length)
        if self._routes is not None and saved.routes is not None:
            self._routes.restore(slot, saved.routes, length=length)

    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        if slot != last:
            self._move(last, slot, length=length)

    def free(self) -> None:
        self._cache.free()
        if self._routes is not None:
            self._routes.free()

    def _reserve(self, *, num_slots: int, length: int) -> None:
        self._cache.reserve(num_slots=num_slots, length=length)
        if self._routes is not None:
            self._routes.reserve(num_slots=num_slots, length=length)

    def _move(self, source: int, target: int, *, length: int) -> None:
        self._cache.copy(source, target, length=length)
        if self._routes is not None:
            self._routes.copy(source, target, length=length)
