"""How vLLM draws tokens for reroll: with the embedded engine's sampler, called where vLLM lets logits be changed.

vLLM's own settings cannot report what a trainer needs. `raw_logprobs` ignores the temperature; `processed_logprobs` are
those after top-p, top-k and `min_tokens`; and a seed gives other tokens once a request is interrupted and continued. So
every request is greedy for vLLM, and this processor leaves it one token to take: the drawn one, whose "logit" is the
log-prob to report. The engine runs with `logprobs_mode="processed_logits"`, which hands that number back as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from reroll.infer.embedded.sampler import Row, choose

_KEY = "reroll"
"""Under which a request's own parameters carry what the processor needs."""


def instructions(row: Row, *, num_held_back: int) -> dict[str, Any]:
    """The `extra_args` of a request that is drawn by `row`, whose `forbidden` hold for its first `num_held_back` tokens."""
    return {_KEY: {"row": asdict(row), "num_held_back": num_held_back}}


@dataclass(frozen=True, slots=True)
class _Seat:
    """A request in vLLM's batch."""

    row: Row
    early_row: Row
    num_held_back: int
    num_prompt: int
    written: list[int]
    """vLLM's own list, which grows as tokens are written."""


class Draw(LogitsProcessor):
    """Draws a token for each row and leaves no other. All requests of the engine must carry `instructions`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._seats: dict[int, _Seat] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._seats, batch_update, _take_seat)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._seats:  # vLLM tries its sampler out before there are requests.
            return logits
        rows, positions = [], []
        for index in range(len(logits)):
            seat = self._seats[index]
            rows.append(seat.early_row if len(seat.written) < seat.num_held_back else seat.row)
            positions.append(seat.num_prompt + len(seat.written))
        tokens, logprobs = choose(logits, rows, positions)
        lowest = torch.finfo(logits.dtype).min
        return logits.fill_(lowest).scatter_(1, tokens[:, None], logprobs[:, None].to(logits.dtype))


def _take_seat(params: VllmParams, prompt_ids: list[int] | None, written: list[int]) -> _Seat:
    assert params.extra_args is not None
    told = params.extra_args[_KEY]
    early_row = Row(**told["row"])
    return _Seat(
        row=replace(early_row, forbidden=()),
        early_row=early_row,
        num_held_back=told["num_held_back"],
        num_prompt=len(prompt_ids or ()),
        written=written,
    )
