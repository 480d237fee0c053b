"""Memory in dense slots: decoding works on contiguous views, which suits a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reroll.infer.embedded.attention import StepAttention
from reroll.infer.embedded.cache import SlotCache
from reroll.infer.embedded.memory import Drawing, Memory
from reroll.infer.embedded.network import Network
from reroll.infer.embedded.sampler import Row, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that is over."""

    tokens: list[int]
    logprobs: list[float]

    def wait(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


class SlotMemory(Memory[Tensor]):
    """A context kept beyond its slot is a copy."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._cache = SlotCache(
            num_layers=network.num_layers,
            num_heads=network.num_kv_heads,
            head_dim=network.head_dim,
            dtype=network.dtype,
            device=network.device,
        )

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    def read(
        self, starts: Sequence[int], unread: Sequence[Sequence[int]], *, leaders: Sequence[int], rows: Sequence[Row]
    ) -> Drawing:
        lengths = [len(tokens) for tokens in unread]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._cache.reserve(num_slots=len(rows), length=max(ends))
        attention = StepAttention(self._cache, starts=starts, lengths=lengths)
        device = self._network.device
        ids = torch.tensor([token for tokens in unread for token in tokens], device=device)
        hidden = self._network.hidden(ids, attention.places, attention)
        if len(hidden) > len(lengths):
            hidden = hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]
        logits = self._network.logits(hidden)
        if leaders:
            logits = logits[torch.tensor([*range(len(lengths)), *leaders], device=device)]
        return Drawn(*sample(logits, rows, [*ends, *(ends[leader] for leader in leaders)]))

    def copy(self, source: int, target: int, *, length: int) -> None:
        self._cache.reserve(num_slots=target + 1, length=length)
        self._cache.copy(source, target, length=length)

    def take_out(self, slot: int, *, length: int) -> Tensor:
        return self._cache.take_out(slot, length=length)

    def put_in(self, slot: int, kept: Tensor, *, length: int) -> None:
        self._cache.reserve(num_slots=slot + 1, length=length)
        self._cache.put_in(slot, kept, length=length)

    def close_gap(self, slot: int, last: int, *, length: int) -> None:
        if slot != last:
            self._cache.copy(last, slot, length=length)

    def free(self) -> None:
        self._cache.free()
