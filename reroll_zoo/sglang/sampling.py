"""How the requests of a batch are drawn, as columns on the device: a step over them waits for nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reroll.infer.embedded.sampler import sample_on_device
from reroll_zoo.paged_cache.plain_sampling import is_plain, sample_plain_on_device
from reroll_zoo.sglang.messages import StartRequest

_WORD, _ALL_BITS = 64, 0xFFFFFFFFFFFFFFFF
_GOLDEN, _FIRST, _SECOND = (value - 2**_WORD for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of splitmix64, as the signed numbers that torch has."""


class RequestTable:
    """The requests of a batch, in order."""

    def __init__(self, starts: Sequence[StartRequest], *, device: torch.device) -> None:
        self._starts = starts
        self._early = [start.row for start in starts]
        self._late = [replace(start.row, forbidden=()) for start in starts]
        self._held_until = [start.held_until for start in starts]
        held_back = {start.row.forbidden for start in starts if start.held_until > len(start.context)}
        self._is_plain = len(held_back) <= 1 and all(is_plain(row, ()) for row in self._late)
        integers = torch.tensor([[_signed(row.seed) for row in self._late], self._held_until])
        self._seeds, self._ends_from = integers.to(device)
        self._temperatures = torch.tensor([row.temperature for row in self._late], dtype=torch.float64).to(device)
        self._end_ids = torch.tensor([token for tokens in held_back for token in tokens], dtype=torch.int64).to(device)

    def is_of(self, starts: Sequence[StartRequest]) -> bool:
        """Whether these are the requests, the very objects."""
        return len(starts) == len(self._starts) and all(map(operator.is_, starts, self._starts))

    def sample(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row of `logits` [R, vocab], and its log-prob. `positions` [R]: where the tokens will stand."""
        if not self._is_plain:
            places = positions.tolist()
            rows = zip(self._early, self._late, self._held_until, places, strict=True)
            return sample_on_device(logits, [late if place >= until else early for early, late, until, place in rows], places)
        tokens, logprobs = sample_plain_on_device(
            logits,
            temperatures=self._temperatures,
            uniform=uniforms(self._seeds, positions),
            may_end=(positions >= self._ends_from).double(),
            end_ids=self._end_ids,
        )
        return tokens.long(), logprobs.float()


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """The numbers of the embedded engine's `uniforms`, made on the device. Products wrap, as they must."""
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + (positions.long() + 1) * _GOLDEN)
    return _shifted(state, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, num_bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift keeps the sign."""
    return (x >> num_bits) & ((1 << (_WORD - num_bits)) - 1)


def _signed(seed: int) -> int:
    """The number that has the same 64 bits."""
    return int.from_bytes((seed & _ALL_BITS).to_bytes(8, "little"), "little", signed=True)
