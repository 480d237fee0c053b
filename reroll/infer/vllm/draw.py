"""How vLLM draws tokens for reroll: with the embedded engine's sampler, called where vLLM lets logits be changed.

vLLM's own settings cannot report what a trainer needs. `raw_logprobs` ignores the temperature; `processed_logprobs` are
those after top-p, top-k and `min_tokens`; and a seed gives other tokens once a request is interrupted and continued. So
every request is greedy for vLLM, and this processor leaves it one token to take: the drawn one, whose "logit" is the
log-prob to report.

There are two ways for that number to the engine. Where the processor is in the engine's process, it is asked for those of
each step (`Draw.drawn`). Where it is in another, which tensor parallelism makes, vLLM carries them:
`logprobs_mode="processed_logits"` hands them back as they are. That way costs vLLM an object per token, so it is for there
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from reroll.infer.embedded.sampler import Row, choose, draw, is_plain, uniforms

_KEY = "reroll"
"""Under which a request's own parameters carry what the processor needs."""


def instructions(name: str, row: Row, *, num_held_back: int) -> dict[str, Any]:
    """The `extra_args` of a request that is drawn by `row`, whose `forbidden` hold for its first `num_held_back` tokens."""
    return {_KEY: {"name": name, "row": asdict(row), "num_held_back": num_held_back}}


@dataclass(frozen=True, slots=True)
class _Seat:
    """A request in vLLM's batch."""

    name: str
    row: Row
    early_row: Row
    num_held_back: int
    num_prompt: int
    written: list[int]
    """vLLM's own list, which grows as tokens are drawn: one that has not reached the host yet has its place in it."""


class _Table:
    """The seats of a batch, in order: as columns, so that a step over hundreds of them is a few array operations."""

    def __init__(self, seats: Sequence[_Seat], *, device: torch.device, is_pinned: bool) -> None:
        self.names = [seat.name for seat in seats]
        self._seats = seats
        self._device, self._is_pinned = device, is_pinned
        self._seeds = [seat.row.seed for seat in seats]
        self._written = [seat.written for seat in seats]
        self._num_prompt = np.array([seat.num_prompt for seat in seats])
        self._num_held_back = np.array([seat.num_held_back for seat in seats])
        self._temperatures = np.array([seat.row.temperature for seat in seats])
        held_back = {seat.early_row.forbidden for seat in seats if seat.num_held_back > 0}
        self._is_plain = len(held_back) <= 1 and all(is_plain(seat.row, ()) for seat in seats)
        self._end_ids = _on_device(tuple(token for tokens in held_back for token in tokens), device)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row, and its log-prob."""
        num_written = np.fromiter(map(len, self._written), np.int64, len(self._written))
        positions = (self._num_prompt + num_written).tolist()
        may_end = num_written >= self._num_held_back
        if not self._is_plain:
            rows = [seat.row if late else seat.early_row for seat, late in zip(self._seats, may_end, strict=True)]
            return choose(logits, rows, positions)
        temperatures, uniform, ends = self._sent(self._temperatures, uniforms(self._seeds, positions), may_end)
        drawn = draw(logits, temperatures=temperatures, uniform=uniform, may_end=ends, end_ids=self._end_ids)
        return drawn[0].long(), drawn[1]

    def _sent(self, *columns: NDArray[Any]) -> Tensor:
        """On the device, without waiting for what it works on."""
        here = torch.empty((len(columns), len(self.names)), dtype=torch.float64, pin_memory=self._is_pinned)
        np.stack(columns, out=here.numpy())
        return here.to(self._device, non_blocking=True)


@lru_cache(maxsize=16)
def _on_device(token_ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, because a copy of a few numbers waits for all that the device works on."""
    return torch.tensor(token_ids, dtype=torch.int64, device=device)


class Drawn:
    """The log-probs of one step, on their way to the host while the device goes on."""

    def __init__(self, names: list[str], logprobs: Tensor, *, is_pinned: bool) -> None:
        self._names, self._logprobs = names, logprobs
        self._arrival: torch.cuda.Event | None = None
        if logprobs.is_cuda:
            self._logprobs = torch.empty(logprobs.shape, dtype=logprobs.dtype, pin_memory=is_pinned)
            self._logprobs.copy_(logprobs, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def logprobs(self) -> dict[str, float]:
        """By the name of the request. Those of prompts read in part are among them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return dict(zip(self._names, self._logprobs.tolist(), strict=True))


class Draw(LogitsProcessor):
    """Draws a token for each row and leaves no other. All requests of the engine must carry `instructions`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device, self._is_pinned = device, is_pin_memory
        self._seats: dict[int, _Seat] = {}
        self._table: _Table | None = None
        """None when the seats have changed."""
        self.drawn: Drawn | None = None
        """In the step that was launched last."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._seats, batch_update, _take_seat):
            self._table = None

    def apply(self, logits: Tensor) -> Tensor:
        if not self._seats:  # vLLM tries its sampler out before there are requests.
            return logits
        if self._table is None:
            seats = [self._seats[index] for index in range(len(logits))]
            self._table = _Table(seats, device=self._device, is_pinned=self._is_pinned)
        tokens, logprobs = self._table.draw(logits)
        self.drawn = Drawn(self._table.names, logprobs, is_pinned=self._is_pinned)
        lowest = torch.finfo(logits.dtype).min
        return logits.fill_(lowest).scatter_(1, tokens[:, None], logprobs[:, None].to(logits.dtype))


def _take_seat(params: VllmParams, prompt_ids: list[int] | None, written: list[int]) -> _Seat:
    assert params.extra_args is not None
    told = params.extra_args[_KEY]
    early_row = Row(**told["row"])
    return _Seat(
        name=told["name"],
        row=replace(early_row, forbidden=()),
        early_row=early_row,
        num_held_back=told["num_held_back"],
        num_prompt=len(prompt_ids or ()),
        written=written,
    )
